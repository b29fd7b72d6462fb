"""Inner products of scores: exact, within groups or of all pairs, or from sketches of a few thousand numbers each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution, Matrix, Outer, in_one_type, joined, matmul, matrices, on_cuda

MOVED = {"cpu": 16, "cuda": 400}
"""What writing an element of a product and reading it again costs, in multiplications: measured on one thread of a CPU
(8 to 40, matrices of 64 x 192 to 384 x 1280); an H100 moves the 4 bytes of one in bfloat16 at 3 TB/s, in which time it
multiplies 300 pairs a ps."""
TILE, BLOCK = 64, 1 << 10
"""A GPU's product takes at least TILE rows and columns at a time, so that G x G inner products cost TILE^2 / G for each
element; one processor takes the whole sum, so that sums are split into blocks."""
STRIPS, SLIM = 4, 1 << 10
"""Of inner products of pairs of tokens a GPU takes what is above the diagonal in so many strips, (1 + 1 / STRIPS) / 2
of all (with 8, slimmer, no less time by the operations), but all where so few tokens do not fill it."""
CACHED_ELEMENTS = 1 << 18
"""How many elements of gradients are multiplied out at a time on a CPU, whose cache holds them (1 MB is within a fifth
of a product of all, 16 MB takes half as much again)."""


def gram_of_parts(parts: list[Contribution], group_size: int) -> Tensor:
    """Inner products <G_a, G_b> of one parameter's gradients within groups of neighbouring sequences, (P, G, G).

    Dense gradients are multiplied out, T R C for each sequence, or T x T Gram products are taken of pairs, T^2 (R + C)
    for each, whichever costs less.
    """
    outers, G = matrices(parts), group_size
    if not outers:
        return gram_of_rows(contributions.vector_total(parts), G)
    dense, lookups = ([part for part in joined(outers) if part.is_lookup is kind] for kind in (False, True))
    terms = [_of_lookup(part, G) for part in lookups if isinstance(part, Outer)]
    if dense:
        first = dense[0]
        T, R, C = sum(part.tokens for part in dense), first.rows, first.columns
        if on_cuda(first.right):
            multiplied_out = (T + (TILE**2 // G if G > 1 else 0) + MOVED["cuda"]) * R * C
            # Both products, in float32, are written, multiplied and summed: 24 bytes a pair.
            of_pairs = (G + -(-G // STRIPS)) * T * T * (R + C + 6 * MOVED["cuda"]) // 2
        else:
            multiplied_out, of_pairs = (T + G + MOVED["cpu"]) * R * C, G * T * T * (R + C)
        by_pairs = len(dense) == 1 and multiplied_out > of_pairs
        terms.append(_of_pairs(first, G) if by_pairs else of_dense(dense, G))
    for part in dense:
        for lookup in lookups:
            cross_PGG = _cross(part, lookup, G)
            terms.append(cross_PGG + cross_PGG.mT)
    return contributions.sum_in_widest(terms)


def gram_of_rows(rows_SN: Tensor, group_size: int) -> Tensor:
    """Inner products <x_a, x_b> of all pairs of rows of a group, (P, G, G)."""
    if group_size == 1:
        return contributions.row_norm2(rows_SN).view(-1, 1, 1)
    rows_PGN = rows_SN.flatten(1).unflatten(0, (-1, group_size))
    gram_PGG = contributions.wide(rows_PGN[:0]).new_zeros(len(rows_PGN), group_size, group_size)
    for columns in contributions.chunks(rows_PGN.shape[2], len(rows_SN), rows_SN):
        some_PGN = rows_PGN[..., columns]
        if not on_cuda(rows_SN):
            gram_PGG.baddbmm_(some_PGN, some_PGN.mT)
            continue
        whole = some_PGN.shape[2] // BLOCK * BLOCK
        blocks_PBGN = some_PGN[..., :whole].unflatten(2, (-1, BLOCK)).transpose(1, 2), some_PGN[:, None, :, whole:]
        for flat in (blocks.flatten(0, 1) for blocks in blocks_PBGN if blocks.numel()):
            gram_PGG += matmul(flat, flat.mT).unflatten(0, (len(gram_PGG), -1)).sum(1)
    return gram_PGG


def of_dense(parts: list[Matrix], G: int) -> Tensor:
    """The same, (P, G, G), from the gradients, of which a few rows are multiplied out at a time.

    All of a head's, V C numbers a sequence, are never there at once.
    """
    first, grams = parts[0], []
    wide_columns = first.columns + max(part.tokens if part.room else 0 for part in parts)
    for groups in contributions.chunks(
        first.sequences // G, G * first.rows * wide_columns, first.right, cpu=CACHED_ELEMENTS
    ):
        rows = slice(groups.start * G, groups.stop * G)
        gram_PGG: Tensor | None = None
        for block in contributions.chunks(
            first.rows, (rows.stop - rows.start) * wide_columns, first.right, cpu=CACHED_ELEMENTS
        ):
            total: Tensor | None = None
            for part in parts:
                # On CUDA of a short type, in which autograd would have the gradient.
                product = torch.bmm(*in_one_type(part.left_at(rows, block).mT, part.right[rows]))
                total = product if total is None else total.add_(product)
            assert total is not None
            product = gram_of_rows(total, G)
            gram_PGG = product if gram_PGG is None else gram_PGG.add_(product)
        assert gram_PGG is not None
        grams.append(gram_PGG)
    return torch.cat(grams)


def _of_pairs(part: Matrix, G: int) -> Tensor:
    """From the Gram products of all tokens of a group, sum_tu (left left')_tu (right right')_tu."""
    T, tokens, grams = part.tokens, G * part.tokens, []
    size = -(-G // STRIPS) if on_cuda(part.right) and tokens > SLIM else G
    for groups in contributions.chunks(part.sequences // G, tokens**2, part.right):
        rows, strips = slice(groups.start * G, groups.stop * G), dict[int, Tensor]()
        right = _together(part.right[rows], G)
        elements = (rows.stop - rows.start) * T if part.room else 1
        for block in contributions.chunks(part.rows, elements, right):
            left, right = in_one_type(_together(part.left_at(rows, block), G), right)
            for start in range(0, tokens, size * T):
                share = matmul(left[:, start : start + size * T], left[:, start:].mT)
                strips[start] = share if start not in strips else strips[start].add_(share)
        gram_PGG = contributions.wide(right[:0]).new_empty(len(right), G, G)
        for start, product in strips.items():
            product *= matmul(right[:, start : start + size * T], right[:, start:].mT)
            first = start // T
            share = product.view(len(right), -1, T, G - first, T).sum((2, 4))
            gram_PGG[:, first : first + size, first:] = share
            gram_PGG[:, first:, first : first + size] = share.mT
        grams.append(gram_PGG)
    return torch.cat(grams)


def _of_lookup(part: Outer, G: int) -> Tensor:
    """From the rows that occur: those of one group and index are neighbours, at most one of each sequence."""
    sequence_S1 = torch.arange(part.sequences, device=part.left.device)[:, None]
    place = Outer(part.left * G + sequence_S1 % G, part.right, part.rows * G)
    key_N, rows_NC = contributions.sum_equal_rows(place, sequence_S1 // G)
    group_N, index_N, of_N = key_N // (part.rows * G), key_N // G, key_N % G
    gram = rows_NC.new_zeros(part.sequences // G * G * G)
    for apart in range(min(G, len(key_N))):
        one, other = slice(len(key_N) - apart), slice(apart, None)
        inner_N = torch.linalg.vecdot(rows_NC[one], rows_NC[other]) * (index_N[one] == index_N[other])
        gram.index_add_(0, (group_N[one] * G + of_N[one]) * G + of_N[other], inner_N)
    gram_PGG: Tensor = gram.view(-1, G, G)
    return gram_PGG.add_(gram_PGG.triu(1).mT)


def _cross(dense: Matrix, lookup: Matrix, G: int) -> Tensor:
    """Inner products <dense_a, lookup_b> of a weight that is used in both ways, (P, G, G)."""
    assert isinstance(lookup, Outer)
    inner = []
    for row in range(dense.sequences):  # with all of its group, of which it is one
        group, one = slice(row // G * G, row // G * G + G), slice(row, row + 1)
        left, right = in_one_type(dense.left_at(one, lookup.left[group].flatten()), dense.right[one])
        product = left[0] * matmul(right[0], lookup.right[group].flatten(0, 1).mT)
        inner.append(product.view(dense.tokens, G, lookup.tokens).sum((0, 2)))
    return torch.stack(inner).view(-1, G, G)


def _together(values_STC: Tensor, G: int) -> Tensor:
    """The tokens of a group's sequences, one after the other, (P, G T, C)."""
    return values_STC.reshape(len(values_STC) // G, -1, values_STC.shape[2])


class Sketch(NamedTuple):
    """The arguments of a sketch, as `ScoreTape.sketch` explains them."""

    seed: int
    directions: int = 16
    dimensions: int = 4096


class Sketcher:
    """Adds up the parameters' shares of a sketch, (S, L).

    It adds coordinates, each with a random sign, into L buckets: E <z_a, z_b> = <x_a, x_b>, with a variance of at most
    (||x_a||^2 ||x_b||^2 + <x_a, x_b>^2) / L. Charikar, Chen and Farach-Colton 2002. Buckets and signs are functions of
    the seed and the parameter, so that sketches of several micro-batches fit together.
    """

    def __init__(self, spec: Sketch, sequences: int, device: torch.device) -> None:
        self._spec = spec
        self.sketch_SL = torch.zeros(sequences, spec.dimensions, device=device)

    def add(self, place: int, index: int | None, parts: list[Contribution]) -> None:
        """Add random combinations of the rows of a parameter's gradients, by its place in the model and its slice."""
        generator, K = generator_for(self._spec.seed, place, -1 if index is None else index), self._spec.directions
        outers = matrices(parts)
        if outers:
            signs_RK = random_signs((outers[0].rows, K), generator).to(contributions.wide(outers[0].right[:0]))
            rows_SN = contributions.sketch(parts, signs_RK / K**0.5).flatten(1)
        else:
            rows_SN = contributions.vector_total(parts)
        N, device = rows_SN.shape[1], rows_SN.device
        bucket_N = torch.randint(self._spec.dimensions, (N,), generator=generator, device="cpu").to(device)
        sign_N = random_signs((N,), generator).to(rows_SN)
        self.sketch_SL = self.sketch_SL.to(torch.promote_types(self.sketch_SL.dtype, rows_SN.dtype))
        self.sketch_SL.index_add_(1, bucket_N, (rows_SN * sign_N).to(self.sketch_SL))


def generator_for(seed: int, *key: int) -> torch.Generator:
    """The generator of random numbers that are a function of the seed and the key."""
    mixed = seed
    for part in key:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return torch.Generator("cpu").manual_seed(mixed)


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Independent random signs, +1 or -1, on the CPU."""
    signs: Tensor = 2.0 * torch.randint(2, shape, generator=generator, device="cpu") - 1
    return signs

"""Inner products of the scores of all pairs of sequences: exact, or from sketches of a few thousand numbers each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution, Matrix, Outer, matrices, vector_total, wide


def gram_of_parts(parts: list[Contribution]) -> Tensor:
    """Inner products <G_a, G_b> of one parameter's gradients, (S, S).

    Gradients are multiplied out, a block of rows at a time, which takes S^2 R C products.
    """
    outers = matrices(parts)
    if not outers:
        return gram_of_rows(vector_total(parts))
    S = outers[0].sequences
    dense = _compact([part.of(slice(0, S)) for part in outers])
    rows, columns = dense[0].rows, dense[0].columns
    gram_SS = wide(dense[0].right[:0]).new_zeros(S, S)
    for block in contributions.chunks(rows, S * columns):
        total_SN = torch.stack([_rows(part, block) for part in dense]).sum(0).flatten(1)
        gram_SS += total_SN @ total_SN.T
    return gram_SS


def gram_of_rows(rows_SN: Tensor) -> Tensor:
    """Inner products <x_a, x_b> of all pairs of rows, (S, S)."""
    flat = rows_SN.flatten(1)
    gram_SS = flat.new_zeros(len(flat), len(flat))
    for block in contributions.chunks(flat.shape[1], len(flat)):
        gram_SS += flat[:, block] @ flat[:, block].T
    return gram_SS


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

    def add(self, place: int, index: int | None, sketch: Callable[[int, torch.Generator], Tensor]) -> None:
        """Add a parameter, or one slice of it, by its place in the model; its store's `sketch` gives rows, (S, N)."""
        generator = generator_for(self._spec.seed, place, -1 if index is None else index)
        rows_SN = sketch(self._spec.directions, generator)
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


def directions(rows: int, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Random directions in the space of a matrix' rows, (R, K), by which combinations of its rows are taken."""
    directions_RK: Tensor = random_signs((rows, count), generator).to(like) / count**0.5
    return directions_RK


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Independent random signs, +1 or -1, on the CPU."""
    signs: Tensor = 2.0 * torch.randint(2, shape, generator=generator, device="cpu") - 1
    return signs


def _compact(parts: list[Outer]) -> list[Outer]:
    """The parts, if all are lookups with only the rows that occur."""
    if not all(part.is_lookup for part in parts):
        return parts
    index_N, inverse = torch.unique(torch.cat([part.left.flatten() for part in parts]), return_inverse=True)
    places = inverse.split([part.left.numel() for part in parts])
    return [
        Outer(place.view_as(part.left), part.right, len(index_N)) for place, part in zip(places, parts, strict=True)
    ]


def _rows(part: Matrix, block: slice) -> Tensor:
    """Some rows of the gradients, (S, n, C)."""
    assert isinstance(part, Outer)
    if not part.is_lookup:
        return contributions.matmul(part.left[:, :, block].mT, part.right)
    inside = (part.left >= block.start) & (part.left < block.stop)
    right = wide(part.right) * inside[..., None]
    out = right.new_zeros(part.sequences, block.stop - block.start, part.columns)
    place = torch.where(inside, part.left - block.start, 0)
    added: Tensor = out.scatter_add_(1, place[..., None].expand_as(right), right)
    return added

"""A look: one pass over the completions of some prompts that takes their scores, and nothing else.

All that is said of noise is linear algebra on what a look gives: with K_i = (<s_ij, s_ik>)_jk a prompt's gradient
g_i = (1/G_i) sum_j a_ij s_ij has ||g_i||^2 = a_i' K_i a_i / G_i^2 under any coefficients, and sketches give the inner
products across prompts, of which the ledger is made. A look frees each layer's factors within the backward, touches no
`.grad`, and works over parameters that FSDP2 has sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, Prior
from oblrpo.estimators.baselines import SAMPLING, TRAINING
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.sequences import MicroBatches, rows_of
from oblrpo.scores import ScoreTape, Sketch
from oblrpo.step.flow import Batch, ImportanceWeights, log_ratio, truncated
from oblrpo.tables.algorithms import SCHEDULES, Algorithm

LOOK, LEDGER = 3.5, 8.0
"""What a look at a token, and a ledger of it, cost, in forwards of a token. Measured on one thread of a CPU: 3.4 to 3.9
and 7.7 to 11, the larger figures with 24 tokens and a width of 64."""
FIRST, FIRST_PROMPTS = 5, 8
"""The first steps, each with a look at so many prompts, whatever it costs: a proxy of norms is fitted from these on."""
OWN_MEMORY = 0.9
"""How much of what a look has found of prompts' own gradients is left one look later."""
WORK_SHARE = 0.02
"""The share of a run's work that its looks take; and its ledgers, where no number of steps is set."""
LOOK_STEPS = 10
"""One step in so many is looked at, where no number is set: a proxy's weights hardly change in between."""


def look_steps(setting: int | None, schedule: str) -> int:
    """The number of steps from one look to the next, under a schedule; None: as many as that wants."""
    if setting is not None:
        return setting
    return 1 if SCHEDULES[schedule].needs_moments else LOOK_STEPS


@dataclass(frozen=True)
class Look:
    """The scores s of P prompts with G outputs each, in squared and other inner products; nothing has a graph."""

    logps: Logps
    """What the forward says of every token of the outputs; 0 where it is not the policy's own."""
    gram_PGG: Tensor
    """Inner products of a prompt's scores, exact."""
    sketches: tuple[Tensor, ...] = ()
    """Two sketches of the scores, (S, L) each, whose inner products are right on average; or none."""
    pairs_SS: Tensor | None = None
    """Inner products of all pairs of scores, exact, if they were requested."""

    @property
    def norm2_PG(self) -> Tensor:
        """Squared score norms."""
        return self.gram_PGG.diagonal(dim1=1, dim2=2)

    @property
    def estimates_SS(self) -> Tensor:
        """Inner products of all pairs: exact, (S, S), or two estimates that are exact within prompts, (2, S, S)."""
        return gram_of(self.sketches, self.gram_PGG) if self.pairs_SS is None else self.pairs_SS


Forward = Callable[[Tensor], tuple[Tensor, Logps, Tensor | None]]
"""What a look asks of some rows: the numbers whose gradients are their scores, (S,) and differentiable; what the
forward says of their tokens; and, where rows are packed, the `sequence_ids` of `ScoreTape.record`."""


def look_by(
    model: nn.Module,
    forward: Forward,
    blocks: list[Tensor],
    group_size: int,
    sketches: Sequence[Sketch] = (),
    all_pairs: bool = False,
    idle: int = 0,
) -> Look:
    """Take the scores of rows by any forward of the model, in one forward and backward of whole groups at a time.

    Args:
        model: the model whose parameters' scores they are.
        forward: runs the model over some of the rows.
        blocks: the rows that go through the model together, each row once; G neighbours are a prompt's. The look has
            them in ascending order.
        group_size: G; of 1, only squared norms are taken.
        sketches: for inner products across prompts.
        all_pairs: whether inner products of all pairs are taken, from a single block.
        idle: passes more, over the last block, that count for nothing: the ranks that share a model which FSDP2 has
            sharded must make as many passes each.

    Raises:
        DivergedError: a log-probability or a score norm is NaN or infinite.
        UnsupportedModelError: as `ScoreTape` says.
    """
    G, tape, outputs, grams = group_size, ScoreTape(model, "streamed"), list[Logps](), list[Tensor]()
    sketched = list[list[Tensor]]()
    for rows_S in blocks + blocks[-1:] * idle:
        with tape:
            scored_S, logps, sequence_ids = forward(rows_S)
            check_finite("log-probability", scored_S.detach())
            gram = len(scored_S) if all_pairs else G
            tape.record(scored_S, sequence_ids=sequence_ids, gram=gram, sketches=sketches)
        outputs.append(logps.detached())
        grams.append(tape.gram())
        sketched.append([tape.sketch(*spec) for spec in sketches])
    gram_PGG, pairs_SS = torch.cat(grams), None
    if all_pairs:
        pairs_SS = gram_PGG[0]
        gram_PGG = pairs_SS.view(-1, G, len(pairs_SS) // G, G).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    check_finite("score norm", gram_PGG.diagonal(dim1=1, dim2=2))
    rows_S = torch.cat(blocks)  # without those of idle passes, which come last above
    order_S, order_P = rows_S.argsort(), rows_S[::G].argsort()
    return Look(
        Logps.join(outputs, order_S),
        gram_PGG[order_P],
        tuple(torch.cat(parts)[order_S] for parts in zip(*sketched, strict=True)),
        pairs_SS,
    )


def look(
    policy: Policy,
    sequences: Sequences,
    group_size: int,
    temperature: float,
    micro_batches: MicroBatches,
    sketch_seed: int | None = None,
    token_weight_SC: Tensor | None = None,
    all_pairs: bool = False,
) -> Look:
    """Take the scores of completions (`look_by`).

    Args:
        policy: the policy whose scores they are.
        sequences: the completions; each G neighbouring rows are a prompt's.
        group_size: G.
        temperature: divides the logits.
        micro_batches: which groups go through the model together.
        sketch_seed: the seed of two sketches, for inner products across prompts; none are taken if None.
        token_weight_SC: weights m of single tokens: scores are then the gradients of sum_t m_t log pi(o_t).
        all_pairs: whether inner products of all pairs are taken, from a single micro-batch.
    """

    def forward(rows_S: Tensor) -> tuple[Tensor, Logps, None]:
        part = sequences.at(rows_S)
        logps = policy.logps(part, temperature)
        if token_weight_SC is None:
            return logps.logps_S, logps, None
        weight_SC = token_weight_SC[rows_S, : part.own_SC.shape[1]].to(logps.logps_S)
        return (logps.token_logps_SC * weight_SC * part.own_SC).sum(1), logps, None

    P, device = sequences.count // group_size, sequences.ids_ST.device
    groups = [torch.arange(P, device=device)] if all_pairs else micro_batches.of(sequences, group_size)
    blocks = [rows_of(block_P, group_size) for block_P in groups]
    sketches = [] if sketch_seed is None else sketches_of(sketch_seed)
    return look_by(policy.model, forward, blocks, group_size, sketches, all_pairs)


@dataclass(frozen=True)
class LookAtBatch:
    """A look at some prompts of a batch."""

    look: Look
    prompts_P: Tensor
    """Which prompts of the batch, ascending, in the order of the look."""
    seed: int | None
    """The seed of the look's sketches; None: no ledger is due."""

    @property
    def grams(self) -> tuple[Tensor, Tensor]:
        """Which prompts were looked at, and the inner products of each of these prompts' scores."""
        return self.prompts_P, self.look.gram_PGG

    def norm2_of(self, batch: Batch) -> Tensor:
        """The squared score norms of the whole batch's outputs, NaN of those that were not looked at."""
        norm2_PG = torch.full_like(batch.rewards_PG, math.nan)
        return norm2_PG.index_copy(0, self.prompts_P, self.look.norm2_PG.to(norm2_PG))

    def rho_PG(self, weights: ImportanceWeights) -> Tensor:
        """The importance weights of the outputs that were looked at; 1 where the sampler is not corrected for."""
        P, G = self.look.norm2_PG.shape
        if weights.sampler_logps_SC is None or weights.clip_max is None:
            return torch.ones_like(self.look.norm2_PG)
        logps, rows_S = self.look.logps, rows_of(self.prompts_P, G)
        sampler_logps_SC = weights.sampler_logps_SC[rows_S, : logps.own_SC.shape[1]]
        log_ratio_S, _ = log_ratio(logps.token_logps_SC, sampler_logps_SC, logps.own_SC)
        return truncated(log_ratio_S, weights.clip_max).view(P, G)


@dataclass
class PastOfLooks:
    """What decides about the next looks, as plain numbers; work is in forwards of a token."""

    taken: int = 0
    """Looks that were taken."""
    tokens: float = 0.0
    """Tokens of the last step."""
    for_looks: float = 0.0
    """Work put aside for looks."""
    for_ledger: float = 0.0
    """Work put aside for ledgers."""
    own: float = 0.0
    """Discounted sum over looks of mean_q ||mu_q||^2 as a part of E||g_i||^2."""
    own_looks: float = 0.0
    """The same of 1."""


@dataclass
class Looks:
    """When a run looks, at which prompts, and when it takes a ledger.

    Work is counted in tokens, and not in seconds, so that a run repeats itself.
    """

    policy: Policy
    temperature: float
    micro_batches: MicroBatches
    every: int = 10
    """Steps between looks, besides the first ones; 1: every step looks at all prompts."""
    ledger_steps: int | None = 0
    """Steps between ledgers, besides that of step 1; 0: none, None: whenever `WORK_SHARE` of the work pays for one."""
    exact: bool = False
    """Whether ledgers are of exact inner products, for which all prompts go through the model at once."""
    apart: bool = False
    """Whether a prompt's outputs go through the model apart, a micro-batch being smaller than a group. Their norms are
    then taken, and their inner products are NaN."""
    _past: PastOfLooks = field(default_factory=lambda: PastOfLooks(), init=False)
    _price: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)  # of this step's look, and its ledger

    def ledger_due(self, step: int) -> bool:
        """Whether step `step` takes a ledger; by earlier steps alone, as all that decides what a look is at."""
        if self.ledger_steps is not None:
            return self.ledger_steps > 0 and (step == 1 or (step > 0 and step % self.ledger_steps == 0))
        return step > 0 and 0 < LEDGER * self._past.tokens <= self._past.for_ledger

    def take(self, batch: Batch, step: int) -> LookAtBatch | None:
        """The look of a step, with what a ledger needs where one is due; None where there is none.

        It is at all prompts for a ledger, and in runs that look at every step. Else it is at some, drawn without a look
        at their outputs, so that means over them are unbiased: as many as past work pays for. If it pays for none, none
        is taken. How many does not depend on this batch: an output would else choose what weighs its siblings.
        """
        part_P, ledger, past = batch.count_P.nonzero().flatten(), self.ledger_due(step), self._past
        self._price = [0.0, LEDGER * past.tokens if ledger and self.ledger_steps is None else 0.0]
        if step < 1 or not (ledger or self.every):
            return None
        if not ledger and self.every > 1:
            if past.taken >= FIRST and step % self.every:
                return None
            cost = LOOK * past.tokens / len(batch.rewards_PG)  # of a prompt
            count = FIRST_PROMPTS if past.taken < FIRST else int(past.for_looks / cost)
            drawn = torch.randperm(len(part_P), generator=torch.Generator("cpu").manual_seed(step), device="cpu")
            part_P = part_P[drawn[:count].to(part_P.device).sort().values]
            self._price[0] = cost * len(part_P) if past.taken >= FIRST else 0.0
        return self.at(batch, part_P, step if ledger else None) if len(part_P) else None

    def at(self, batch: Batch, prompts_P: Tensor, seed: int | None = None) -> LookAtBatch:
        """A look at these prompts of a batch; with a seed it is one that a ledger can be taken of."""
        return LookAtBatch(self._look(batch, prompts_P, seed), prompts_P, seed)

    def _look(self, batch: Batch, prompts_P: Tensor, seed: int | None, weight_SC: Tensor | None = None) -> Look:
        G, exact = batch.rewards_PG.shape[1], self.exact and seed is not None
        sequences, seed = batch.sequences.at(rows_of(prompts_P, G)), None if exact else seed
        group = 1 if self.apart else G
        seen = look(self.policy, sequences, group, self.temperature, self.micro_batches, seed, weight_SC, exact)
        if not self.apart:
            return seen
        norm2_PG = seen.norm2_PG.view(-1, G)
        unknown_PGG = torch.full((*norm2_PG.shape, G), math.nan, dtype=norm2_PG.dtype, device=norm2_PG.device)
        return replace(seen, gram_PGG=unknown_PGG.diagonal_scatter(norm2_PG, dim1=1, dim2=2))

    def ledger(
        self, looked: LookAtBatch, batch: Batch, prior: Prior, weights: ImportanceWeights
    ) -> estimators.Ledger | None:
        """The ledger of the prompts with outputs enough for every baseline; None where fewer than two have them.

        Baselines by token take a second look, at scores of tokens that their advantages weigh. Where the sampler is
        corrected for, scores are rho grad log pi: their inner products, norms and all that follows. The prior is what
        earlier steps say, for `oblr_shrunk`.
        """
        G, looked_P, seen = batch.rewards_PG.shape[1], looked.prompts_P, looked.look
        keep_P = (batch.valid_PG[looked_P].sum(1) >= min(2, G)).nonzero().flatten()
        if len(keep_P) < 2:
            return None
        chosen_P, keep_S = looked_P[keep_P], rows_of(keep_P, G)
        rewards_PG, valid_PG = batch.rewards_PG[chosen_P], batch.valid_PG[chosen_P]
        rho_PG = looked.rho_PG(weights)[keep_P]

        def weighted(of: Look) -> Tensor:
            return of.estimates_SS[..., keep_S[:, None], keep_S] * rho_PG.view(-1, 1) * rho_PG.flatten()

        def by_token(advantages_PGT: Tensor) -> Tensor:
            weight_SC = torch.zeros_like(seen.logps.token_logps_SC)
            weight_SC[keep_S] = advantages_PGT.flatten(0, 1).to(weight_SC)
            return weighted(self._look(batch, looked_P, looked.seed, weight_SC))

        shape = (*rewards_PG.shape, -1)
        own_PGT = seen.logps.own_SC[keep_S].view(shape).to(rewards_PG)
        logit_norm2_PGT = seen.logps.logit_norm2_SC[keep_S].view(shape)
        inputs = estimators.baseline_inputs(own_PGT, seen.norm2_PG[keep_P], logit_norm2_PGT)
        weight_PG = batch.weight_PG[chosen_P]
        return ledger_of(weighted(seen), rewards_PG, valid_PG, inputs, prior, rho_PG, weight_PG, by_token)

    def metrics(
        self, looked: LookAtBatch | None, batch: Batch, prior: Prior, weights: ImportanceWeights
    ) -> dict[str, float]:
        """The ledger of a step as metrics, in steps that take one; else nothing."""
        if looked is None or looked.seed is None:
            return {}
        if (ledger := self.ledger(looked, batch, prior, weights)) is None:
            return {}
        return ledger_metrics(ledger)

    def save_up(self, tokens: float, trained: float, looked: bool) -> None:
        """Pay for the step's look, if one was taken, and put the share of its work aside, once it has made its update.

        tokens are those of all completions and their prompts, trained those that the gradient was taken of.
        """
        past = self._past
        share = WORK_SHARE * (SAMPLING * tokens + TRAINING * trained)
        past.for_looks += share - self._price[0]
        past.for_ledger += share - self._price[1]
        past.tokens, past.taken = float(tokens), past.taken + looked

    def observe_own(self, own2: float, mean_norm2: float) -> None:
        """Take in `own_norm2` of a look, and the mean squared norm of its prompts' gradients."""
        if mean_norm2 and not math.isnan(own2):
            past = self._past
            past.own, past.own_looks = OWN_MEMORY * past.own + own2 / mean_norm2, OWN_MEMORY * past.own_looks + 1

    @property
    def own_share(self) -> float:
        """mean_q ||mu_q||^2 as a part of E||g_i||^2, by looks that count .9 times less a look; NaN before the first."""
        return self._past.own / self._past.own_looks if self._past.own_looks else math.nan

    def of_rows(self, found: estimators.Moments, own2: float, rows: int | None) -> estimators.Moments:
        """A step's moments where there are so many prompts; looks say what its own do not, own2 being NaN then."""
        if rows is None:
            return found
        return found.of_rows(self.own_share * (found.signal2 + found.trace_cov) if math.isnan(own2) else own2, rows)

    def state_dict(self) -> dict[str, Any]:
        """What was put aside, and what looks have found."""
        return asdict(self._past)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._past = PastOfLooks(**state)


DIRECTIONS, DIMENSIONS = 8, 2048
"""The size of each of the two independent sketches that inner products come from; see `ScoreTape.sketch`."""

COUNTED = 100
"""The batches of an epoch from which on prompts count as without number. What a batch of N of M prompts lacks is at
most N / M of its noise, so that N SNR is then too low by 1 % of 1 + N SNR at the most."""


def counted(rows: int | None, prompts: int, outputs: int, algorithm: Algorithm) -> int | None:
    """The number of prompts, if it is few for batches of so many, and if a prompt's mean gradient is E[F s | q]."""
    known = algorithm.unbiased and outputs > 1  # one output alone does not tell the two kinds of noise apart
    return rows if rows is not None and known and rows < COUNTED * prompts else None


def ledger_of(
    gram: Tensor,
    rewards_PG: Tensor,
    valid_PG: Tensor,
    inputs: Mapping[str, Tensor],
    prior: Prior,
    rho_PG: Tensor | None = None,
    weight_PG: Tensor | None = None,
    by_token: Callable[[Tensor], Tensor] | None = None,
) -> estimators.Ledger:
    """The ledger of a batch whose scores' inner products were taken, (S, S), or two estimates of them, (2, S, S).

    Every prompt has a valid output. `inputs` are those of `baseline_inputs`; importance weights rho_PG and the loss
    weighting weight_PG are 1 if None; `by_token` gives the inner products under advantages by token, (P, G, T).
    """
    weight_PG = torch.ones_like(rewards_PG) if weight_PG is None else weight_PG
    coefs, grams = {}, {}
    advantages = estimators.under_every_baseline(rewards_PG, inputs, valid_PG=valid_PG, rho_PG=rho_PG, prior=prior)
    for name, (advantage, divisor_PG) in advantages.items():
        scale_PG = weight_PG / divisor_PG
        if not BASELINES[name].by_token:
            coefs[name] = advantage * scale_PG
        elif by_token is not None:
            coefs[name], grams[name] = scale_PG, by_token(advantage)
    plainly = bool((weight_PG == 1).all())  # a loss weighting has another mean gradient
    unbiased = {name: BASELINES[name].unbiased and plainly for name in coefs}
    return estimators.ledger(gram, coefs, rewards_PG, unbiased, grams, valid_PG)


def ledger_metrics(ledger: estimators.Ledger) -> dict[str, float]:
    """`variance/NAME` and `signal2/NAME` of every baseline, and the variance that no baseline can remove."""
    metrics = {f"variance/{name}": entry.variance for name, entry in ledger.entries.items()}
    metrics |= {f"signal2/{name}": entry.signal2 for name, entry in ledger.entries.items()}
    return metrics | {"variance_between_prompts": ledger.between}


def sketches_of(seed: int) -> list[Sketch]:
    """Two independent sketches of scores, as `ScoreTape.sketch` takes them."""
    return [Sketch(2 * seed + which, DIRECTIONS, DIMENSIONS) for which in range(2)]


def gram_of(sketches: Sequence[Tensor], exact: Tensor) -> Tensor:
    """An estimate of the scores' inner products from each sketch, (2, S, S), exact where they are known.

    That is the squared norms, (S,), or the inner products within groups of neighbours, (P, G, G).
    """
    exact_PGG = exact[:, None, None] if exact.ndim == 1 else exact
    P, G = exact_PGG.shape[:2]
    gram = torch.stack([sketch_SL @ sketch_SL.T for sketch_SL in sketches]).view(-1, P, G, P, G)
    within = exact_PGG.to(gram).permute(1, 2, 0).expand(len(gram), -1, -1, -1)
    return gram.diagonal_scatter(within, dim1=1, dim2=3).view(-1, P * G, P * G)

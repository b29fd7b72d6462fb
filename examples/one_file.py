"""OBLR-PO in one file, top to bottom, to read and to copy: `python examples/one_file.py` (75 seconds on one core).

A tiny Qwen3 policy finds routes in graphs (`ab,bc,cd,ae:a>d=` -> `abcd`). It samples, weighs rewards by exact squared
score norms, and sets its learning rate from its gradients. Bring your own model, prompts and reward; `oblrpo.scores`
and `oblrpo.estimators` need torch only. The trainer adds: missing rewards, gradients that are 0 or not finite, sets of
few prompts, micro-batches, several updates a batch.

Axes of names: P prompts, G outputs a prompt, S = P G sequences, T tokens of prompt and completion, V vocabulary.
"""

import math
import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblrpo import ScoreTape, SNRSchedule, baseline
from oblrpo.estimators import Prior, advantages, differ, headroom, moments, squared_norm
from oblrpo.tasks import make_task

P, G, LONGEST, WARM, STEPS = 64, 4, 12, 200, 120
END = 256  # bytes are tokens, and one more ends a completion


def rows(prompts, completions):
    """Prompts and completions as (S, T) tokens, padded on the right, and which of them are the policy's own."""
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids_ST, own_ST = torch.full((len(prompts), width), END), torch.zeros(len(prompts), width)
    for s, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids_ST[s, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        own_ST[s, len(prompt) : len(prompt) + len(completion)] = 1
    return ids_ST, own_ST


def token_logps(model, ids_ST, own_ST):
    """log pi of every token, (S, T); 0 where it is not the policy's own. Attention is causal: padding needs no mask."""
    logp_STV = model(input_ids=ids_ST, use_cache=False).logits[:, :-1].log_softmax(-1)
    logp_ST = logp_STV.gather(2, ids_ST[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp_ST, (1, 0)) * own_ST


@torch.no_grad()
def sample(model, prompts):
    """One completion of every prompt, from the whole distribution: no top-k, no top-p, temperature 1."""
    longest = max(map(len, prompts))
    ids_ST = torch.tensor([[END] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_ST = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawn_ST = model.generate(
        ids_ST, attention_mask=mask_ST, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        max_new_tokens=LONGEST, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    return [row[: row.index(END) + 1] if END in row else row for row in drawn_ST[:, longest:].tolist()]


class OBLRPO:
    """One update a batch: baseline `oblr_shrunk`, and the measured rate."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.tape, self.prior, self.schedule = ScoreTape(model), Prior(), SNRSchedule(optimizer, "auto")

    def step(self, ids_ST, own_ST, rewards_PG):
        """Learn from P prompts with G outputs each, row p G + j being output j of prompt p."""
        valid_PG, (prompts, outputs) = torch.ones_like(rewards_PG, dtype=torch.bool), rewards_PG.shape
        if not differ(rewards_PG, valid_PG):
            return {"learning_rate": 0.0}  # with equal rewards a step would be noise: scores have the mean 0
        # Score: one forward, and one backward for activations. The tape keeps what every score s = grad log pi is
        # made of; no `.grad` is touched yet.
        with self.tape:
            logp_ST = token_logps(self.model, ids_ST, own_ST)
            self.tape.record(logp_ST.sum(1))
        # Baseline: b_j = sum w F / sum w over the other outputs, with w = ||s||^2 (theorem 7), shrunk towards what
        # other prompts and earlier steps say. It never looks at its own output, so the gradient is unbiased.
        norm2_PG = self.tape.norm2().view_as(rewards_PG)
        b_PG = baseline("oblr_shrunk", rewards_PG, norm2_PG=norm2_PG, prior=self.prior)
        self.prior.observe(rewards_PG, norm2_PG)
        self.prior.next_step()
        # Gradient: g = mean_i g_i with g_i = mean_j (F - b) s, from the tape, without another backward. Optimizers
        # descend, hence the minus. The norms of the prompts' own g_i come from the same products, less their 1 / P.
        coef_PG = -advantages(rewards_PG, b_PG) / (prompts * outputs)
        self.optimizer.zero_grad()
        group_norm2_P = self.tape.accumulate(coef_PG.flatten(), outputs) * prompts**2
        self.tape.forget()
        # Signal and noise: SNR = ||grad J||^2 / tr H, unbiased. `.grad` must be all of the gradient, and not clipped.
        batch = moments(group_norm2_P, squared_norm(list(self.model.parameters())))
        # Rate and update: as long as the gradients after the last steps say that these should have been. Then measure
        # how far the policy moved, on one output of four; a step that went too far is shortened. `headroom`: no step
        # needs to go further than could earn all that is left to earn.
        self.schedule.step(
            batch, mean_length=float(own_ST.sum(1).double().mean()), headroom=headroom(rewards_PG, valid_PG)
        )
        rate = self.schedule.learning_rates[0]
        self.optimizer.step()
        some_ids_ST, some_own_ST, before_ST = ids_ST[::4], own_ST[::4], logp_ST[::4].detach()
        with torch.no_grad():
            kl, share = self.schedule.limit_step(lambda: token_logps(self.model, some_ids_ST, some_own_ST) - before_ST)
        return {"learning_rate": rate * share, "step_kl": kl, "n_snr": self.schedule.smoothed.n_snr}


def main():
    """A warm start on noisy demonstrations, then RL."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, rng = make_task("path"), random.Random(0)
    # In eval mode: with dropout, log-probabilities would change by themselves.
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=END + 1, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, initializer_range=0.05,
        )
    ).eval()  # fmt: skip
    teacher = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(WARM):
        for group in teacher.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / WARM)) / 2
        problems = task.train_batch(-1 - step, 128)  # batches that RL does not see; one hop of seven is wrong
        texts = [task.demonstration(problem, rng, 0.15) for problem in problems]
        batch = rows([list(each.prompt.encode()) for each in problems], [[*text.encode(), END] for text in texts])
        (-token_logps(model, *batch).sum() / batch[1].sum()).backward()
        teacher.step()
        teacher.zero_grad()
    # The rate is where it starts; it finds its own from there.
    algorithm = OBLRPO(model, torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0))
    for step in range(1, STEPS + 1):
        problems = [problem for problem in task.train_batch(step, P) for _ in range(G)]
        prompts = [list(problem.prompt.encode()) for problem in problems]
        completions = sample(model, prompts)
        texts = [bytes(token for token in row if token < END).decode(errors="replace") for row in completions]
        rewards_PG = torch.tensor(task.rewards(problems, texts)).view(P, G)
        metrics = algorithm.step(*rows(prompts, completions), rewards_PG)
        if step % 10 == 0 or step == 1:
            print(f"step {step:3}  reward {rewards_PG.mean():.3f}", *(f" {k} {v:.2g}" for k, v in metrics.items()))


if __name__ == "__main__":
    main()

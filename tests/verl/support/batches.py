"""Batches as verl's workers get them: shuffled outputs of several prompts, padding rows, by hand."""

import torch
from verl.utils import tensordict_utils as tu

TOOLS = slice(1, 3), slice(-2, None), slice(0, 1), slice(0, 0), slice(None)
"""Where the words of tools stand in long answers: inside, at the end, at the beginning, nowhere, everywhere."""

EMPTY = 9
"""A row of which no word is the policy's own, though it may be short."""


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_rows(prompts, outputs, padding, vocabulary, seed, longest=6):
    """Rows in random order: prompts of random length with `outputs` outputs each (one has fewer), and padding rows."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(2, vocabulary, (count,), generator=generator)

    rows = []
    for prompt in range(prompts):
        question = ids(2, 7)
        for _ in range(outputs - (padding > 0 and prompt == 0)):
            answer = ids(1, longest + 1)
            mask = torch.ones_like(answer)
            if len(rows) == EMPTY or len(answer) > 3:
                mask[TOOLS[len(rows) % len(TOOLS)]] = 0
            rows.append({"uid": f"{prompt:032x}", "prompts": question, "responses": answer, "response_mask": mask})
    for _ in range(padding):
        filler = {"prompts": torch.ones(3, dtype=torch.long), "responses": torch.ones(1, dtype=torch.long)}
        rows.append({"uid": "pad0", **filler, "response_mask": torch.zeros(1, dtype=torch.long)})
    return [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]


def as_data(rows, **meta):
    """A TensorDict of these rows."""
    tensors = {key: nested([row[key] for row in rows]) for key in ("prompts", "responses", "response_mask")}
    whole = [torch.cat([row["prompts"], row["responses"]]) for row in rows]
    tensors["input_ids"] = nested(whole)
    tensors["position_ids"] = nested([torch.arange(len(each)) for each in whole])
    tensors["loss_mask"] = nested([row["response_mask"] for row in rows])
    if "advantage" in rows[0]:
        tensors["advantages"] = nested([row["advantage"] * row["response_mask"] for row in rows])
        zeros = [torch.zeros(len(row["responses"])) for row in rows]
        tensors["old_log_probs"] = nested(
            [row.get("old_log_probs", zero) for row, zero in zip(rows, zeros, strict=True)]
        )
    data = tu.get_tensordict({**tensors, "uid": [row["uid"] for row in rows]}, {})
    tu.assign_non_tensor(data, use_dynamic_bsz=False, use_fused_kernels=False, temperature=1.0)
    for key, value in meta.items():
        tu.assign_non_tensor_data(data, key, value)
    return data


def logps(model, rows, temperature=1.0):
    """Log-probability of each row's scored tokens by the plain model, one row at a time, (S,)."""
    total = []
    for row in rows:
        whole, start = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"])
        logits = model(input_ids=whole[None], use_cache=False).logits[0, start - 1 : -1] / temperature
        logp = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
        total.append((logp * row["response_mask"]).sum())
    return torch.stack(total)

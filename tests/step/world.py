"""Policies so small that every batch can be listed: P prompts with G outputs of one token each, out of V."""

import itertools

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblrpo.policy import Policy, Sequences, byte_tokenizer
from oblrpo.rollout import Rollouts

P = 2


def policy_of(V):
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=4, initializer_range=0.3)  # fmt: skip
    return Policy(Qwen3ForCausalLM(config).double().eval(), byte_tokenizer())


def sequences_of(outputs_PG):
    S = outputs_PG.numel()
    prompt_SQ = torch.arange(P).repeat_interleave(outputs_PG.shape[1])[:, None]
    ones_S1 = torch.ones(S, 1, dtype=torch.long)
    return Sequences.of(prompt_SQ, ones_S1, outputs_PG.reshape(S, 1), ones_S1)


def logps_PV(policy, V):
    return policy.logps(sequences_of(torch.arange(V).expand(P, V))).logps_S.view(P, V)


def batches(sampler, V, G, listed=P):
    """Every batch that a sampler may draw, with what it reports, and its probability.

    Where fewer prompts are listed than there are, the others have the same outputs in every batch.
    """
    mu_PV = logps_PV(sampler, V).detach()
    for drawn in itertools.product(range(V), repeat=listed * G):
        outputs_PG = torch.arange(P * G).view(P, G) % V
        outputs_PG[:listed] = torch.tensor(drawn).view(listed, G)
        reported_PG = mu_PV.gather(1, outputs_PG)
        rollouts = Rollouts(sequences_of(outputs_PG), [], None, reported_PG.view(P * G, 1))
        yield outputs_PG, rollouts, float(reported_PG[:listed].sum().exp())


def grads(policy):
    """The gradient, 0 where no output was trained on."""
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in policy.parameters])


def minus_grad_J(policy, reward_PV):
    objective = (logps_PV(policy, reward_PV.shape[1]).exp() * reward_PV).sum(1).mean()
    return -torch.cat([each.flatten() for each in torch.autograd.grad(objective, policy.parameters)])

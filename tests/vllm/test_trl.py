"""TRL's `use_vllm=True, vllm_mode="colocate"` with the real engine: completions, gradient and ledger are the policy's.

The engine is opened once for each type of numbers, and serves one trainer after another.
"""

import logging
import os

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from oblrpo import estimators
from oblrpo.adapters.trl import VarianceLedgerCallback
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from tests.trl.support import Capture, assert_first_tokens, flat, ours, theirs
from tests.trl.test_gradient import assert_close, expected, policy_of
from tests.vllm import support

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """What opens TRL's engines on a CPU, in the numbers that `engines["dtype"]` says.

    TRL calls the engine model's `load_weights` itself, and vLLM's linear layers on a CPU keep nothing that it could
    load into: they pack their weights once a checkpoint is read. On a GPU they keep them; here the product is the
    plain one, which does, too. And TRL leaves the type to vLLM, which rounds a model in float32 to bfloat16.
    """
    found, before = {"dtype": "float32", "folder": tmp_path_factory.mktemp("model")}, dict(os.environ)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    from vllm.model_executor.layers import utils

    def keep_the_weight(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    def opened(seed, **words):
        key = (found["dtype"], words["model"])
        if key not in found:
            found[key] = real(seed=seed, **words | {"dtype": key[0], "enforce_eager": True})
        torch.manual_seed(seed)  # as the engine does when it is opened
        return found[key]

    real = vllm_generation.LLM
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_the_weight)
        patches.setattr(vllm_generation, "LLM", opened)
        yield found
    os.environ.clear()
    os.environ.update(before)  # TRL has written ranks there


@pytest.fixture
def sampled(engines, tmp_path):
    """Make a trainer whose completions vLLM samples, with what each of its updates was made of."""

    def make(make=ours, policy=None, dtype="float32", **given):
        policy, engines["dtype"] = policy or support.tiny_policy(), dtype
        folder = engines["folder"] / ("tied" if policy.model.config.tie_word_embeddings else "untied")
        if not folder.exists():
            policy.model.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
        policy.model.name_or_path = str(folder)
        given = {"use_vllm": True, "vllm_max_model_length": 64, "max_steps": 3} | given
        trainer = make(tmp_path, policy, **given)
        return trainer, Capture(trainer).updates

    return make


def untied():
    """The tiny policy with a head of its own."""
    tokenizer = support.tiny_policy().tokenizer
    return Policy(support.policy_of("qwen3-untied").model, tokenizer)


def whole(update):
    """The batch of an update, its micro-batches joined."""
    parts = update["batch"]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if parts[0][name].ndim}


@torch.no_grad()
def apart(trainer, update):
    """How far vLLM's log-probabilities are off those of the weights that were trained on, a token, at most."""
    policy, batch, off = policy_of(trainer, update), whole(update), []
    for row in range(len(batch["prompt_ids"])):
        prompt, words = (
            batch[f"{kind}_ids"][row][batch[f"{kind}_mask"][row].bool()] for kind in ("prompt", "completion")
        )
        logits = policy.model.eval()(input_ids=torch.cat([prompt, words])[None]).logits[0, len(prompt) - 1 : -1].float()
        logp_C = (logits / trainer.temperature).log_softmax(-1).gather(1, words[:, None])[:, 0]
        off.append((logp_C - batch["sampling_per_token_logps"][row][: len(words)]).abs().max())
    return float(max(off))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.7},
        {"policy": untied},
        {"peft_config": LoraConfig(**LORA), "schedule": "off", "learning_rate": 0.05},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 3},
        {"vllm_max_model_length": 8, "max_completion_length": 20, "per_device_train_batch_size": 2,
         "gradient_accumulation_steps": 4},
    ],
    ids=["temperature", "untied", "lora", "several generations", "cut short, halves of groups"],
)  # fmt: skip
def test_completions_are_the_policy_s_and_so_is_the_gradient(sampled, given):
    """Before the first update and after others, whose advantages times scores are those of loop autograd."""
    given = given | {"policy": given["policy"]()} if "policy" in given else given
    trainer, updates = sampled(**given)
    trainer.train()
    prior = estimators.Prior()
    for update, log in zip(updates, trainer.state.log_history, strict=False):
        assert apart(trainer, update) < 2e-5
        assert 0 < log["sampling/sampling_logp_difference/mean"] < log["sampling/sampling_logp_difference/max"] < 2e-5
        assert log["learning_rate"] > 0
        if "steps_per_generation" not in given:  # whose batch is the last generation's alone
            assert_close(-flat(update["grads"]), expected(trainer, update, "oblr_shrunk", prior).mean(0), 2e-5)
            prior.next_step()
    first, last = (flat(each["weights"]) for each in (updates[0], updates[-1]))
    assert float((last - first).abs().max()) > 1e-4


def test_first_tokens_have_the_policy_s_frequencies(sampled):
    """By chi-square, of weights that the engine was not opened with."""
    policy = support.tiny_policy(model_args={"initializer_range": 0.2})
    support.update(policy)
    trainer, _ = sampled(policy=policy, temperature=0.8, max_completion_length=1)
    assert_first_tokens(trainer, policy, 0.8)


def recorded(trainer):
    """What each generation of a trainer brings, as long as it runs."""
    draw, drawn = trainer._generate_single_turn, []

    def turn(*words, **named):
        drawn.append(draw(*words, **named))
        return drawn[-1]

    trainer._generate_single_turn = turn
    return drawn


def replayed(trainer, drawn):
    """The trainer, without vLLM, on these completions."""
    turns = iter(drawn)
    trainer._generate_single_turn = lambda *_, **__: next(turns)
    return trainer


def test_the_same_completions_train_the_same_without_vllm(sampled, tmp_path):
    """Bit for bit: weights, rates, and all that is logged of signal and noise."""
    trainer, _ = sampled()
    drawn = recorded(trainer)
    trainer.train()
    other = replayed(ours(tmp_path, support.tiny_policy(), max_steps=3), drawn)
    other.train()
    assert torch.equal(flat(other.model.state_dict()), flat(trainer.model.state_dict()))
    for one, two in zip(trainer.state.log_history[:3], other.state.log_history[:3], strict=True):
        keys = two.keys() - {"step_time"}
        assert {key: one[key] for key in keys} == {key: two[key] for key in keys}
        assert one["step_kl"] > 0


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_the_ledger_is_that_of_the_same_completions_without_vllm(sampled, tmp_path, kind, config):
    """Under TRL's own trainers; GRPOTrainer's correction is on by default, and finds rounding alone."""
    words = {"kind": kind, "config": config, "beta": 0.0, "max_steps": 1}
    trainer, _ = sampled(theirs, **words)
    drawn = recorded(trainer)
    other = replayed(theirs(tmp_path, support.tiny_policy(), **words), drawn)
    for each in (trainer, other):
        each.add_callback(VarianceLedgerCallback(each, every=1))
        each.train()
    one, two = trainer.state.log_history[0], other.state.log_history[0]
    keys = [key for key in two if key.startswith(("variance/", "signal2", "trace_cov", "snr"))]
    assert len(keys) > 20
    assert {key: one[key] for key in keys} == {key: two[key] for key in keys}
    assert one.get("sampling/sampling_logp_difference/max", 0) < 2e-5


def test_a_run_again_begins_with_the_weights_as_they_are(sampled):
    """TRL hands weights over where the step's number has changed, and that of a second run's first step has not."""
    trainer, updates = sampled(max_steps=1, schedule="off", learning_rate=0.05)
    for _ in range(3):
        trainer.train()
    assert max(apart(trainer, update) for update in updates) < 2e-5
    trainer._generate_single_turn([[65]], None, {}, 1)  # as an evaluation after the best checkpoint was loaded
    assert trainer._last_loaded_step == trainer.state.global_step == 1


def test_the_seed_is_that_of_the_completions(sampled):
    """The engine seeds all random numbers with 0 whatever the run's seed is."""
    drawn = []
    for seed in (3, 4, 3):
        trainer, updates = sampled(seed=seed, max_steps=1, shuffle_dataset=False)
        trainer.train()
        drawn.append(whole(updates[0])["completion_ids"].tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_resumed_run_draws_what_the_whole_run_drew(sampled, tmp_path):
    left = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer, updates = sampled(max_steps=4, save_strategy="steps", save_steps=2, shuffle_dataset=False)
        trainer.train(resume_from_checkpoint=checkpoint)
        left.append((whole(updates[-1])["completion_ids"].tolist(), flat(trainer.model.state_dict())))
    assert left[0][0] == left[1][0]
    assert torch.equal(left[0][1], left[1][1])


def test_weights_below_adapters_stay_as_they_are(sampled):
    """In bfloat16, where a merge in place and its undoing leave rounding that adds up."""
    policy = support.tiny_policy()
    policy.model.to(torch.bfloat16)
    trainer, updates = sampled(
        policy=policy, dtype="auto", bf16=True, peft_config=LoraConfig(**LORA), schedule="off", learning_rate=0.03
    )
    trainer.train()
    frozen = [name for name, parameter in trainer.model.named_parameters() if not parameter.requires_grad]
    now = trainer.model.state_dict()
    assert frozen
    assert all(torch.equal(now[name], updates[0]["weights"][name]) for name in frozen)
    assert trainer.state.log_history[2]["sampling/sampling_logp_difference/mean"] < 0.02


def test_rounding_in_the_engine_is_said_and_measured(sampled, caplog):
    with caplog.at_level(logging.WARNING, "oblrpo"):
        trainer, _ = sampled(dtype="auto", max_steps=1)
    trainer.train()
    assert "vLLM samples in torch.bfloat16, and the weights that are trained are in torch.float32" in caplog.text
    assert 1e-4 < trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"] < 0.02


def test_an_engine_with_other_weights_is_refused(sampled):
    policy = support.tiny_policy()
    sampled(policy=policy)[0].train()
    support.update(policy, 0.5)
    trainer, _ = sampled(policy=policy)
    trainer.vllm_generation.sync_weights = lambda: None
    with pytest.raises(InputError, match=r"the log-probabilities of vLLM are .* nats per token off the policy's"):
        trainer.train()


def test_adapters_that_are_not_merged_aside_are_refused(sampled):
    with pytest.raises(InputError, match=r"use_vllm=True: the adapter of .*use_dora.* cannot be merged"):
        sampled(peft_config=LoraConfig(**LORA, use_dora=True))


def test_trl_s_correction_is_trl_s(sampled, caplog):
    """On by default in TRL, and off in ours; a sentence says that its ratios are bounded."""
    with caplog.at_level(logging.WARNING, "oblrpo"):
        trainer, _ = sampled(vllm_importance_sampling_correction=True, max_steps=1)
    assert "vllm_importance_sampling_correction=True (its ratios are bounded)" in caplog.text
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert log["learning_rate"] > 0

"""The gradient that the optimizer sees against loop autograd and the library's functions."""

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    TrainerCallback,
)

from oblrpo import estimators
from oblrpo.adapters.trl.accumulated import first_half
from oblrpo.adapters.trl.advantages import sequences_of
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.scores import CalibratedProxy
from tests.trl.support import PROMPTS, Capture, flat, ours, reward, scores, tiny_policy

G = 4
MASKED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def run(tmp_path, steps=1, **given):
    """A trained policy and what its updates were made of."""
    policy = given.pop("policy", None) or tiny_policy()
    lengths = given.pop("lengths", None)
    trainer = ours(tmp_path, policy, max_steps=steps, **{"look_steps": 1} | given)
    if lengths:
        trainer._generate_single_turn = lambda prompts, *_: (
            [[80 + row] * lengths[row % len(lengths)] for row in range(len(prompts))],
            None,
        )
    captured = Capture(trainer)
    trainer.train()
    return trainer, captured.updates


def policy_of(trainer, update):
    """The policy as it was before an update; a copy would not do, whose forward TRL has bound to the original."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(update["weights"][name])
    return trainer._policy


def scores_of(trainer, update):
    """The scores of an update's completions by loop autograd, (P, G, N)."""
    before, batch = policy_of(trainer, update), {k: torch.cat([part[k] for part in update["batch"]]) for k in MASKED}
    prompts_PGQ = batch["prompt_ids"].unflatten(0, (-1, G))
    assert (prompts_PGQ == prompts_PGQ[:, :1]).all()
    return scores(before, batch, trainer.temperature).unflatten(0, (-1, G))


def expected(trainer, update, name, prior=None):
    """Advantages from exact norms by loop autograd, and of each prompt the mean of A grad log pi."""
    scores_PGN, rewards_PG = scores_of(trainer, update), update["generation"].rewards_PG
    if trainer.args.loss_type == "dr_grpo":
        scores_PGN = scores_PGN / trainer.args.max_completion_length
    norm2_PG = scores_PGN.square().sum(2)
    b = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG, prior=prior)
    if prior is not None:
        prior.observe(rewards_PG, norm2_PG)
    return ((rewards_PG - b)[..., None] * scores_PGN).mean(1)


def moments_of(trainer, update, gradient_PN):
    """Of all prompts' own norms, in a data set none of whose prompts is in a batch twice; or of two halves."""
    args, P = trainer.args, len(gradient_PN)
    norm2 = float(gradient_PN.mean(0).square().sum())
    if args.per_device_train_batch_size < G:  # no prompt goes through the model as a whole
        first = P * first_half(args.gradient_accumulation_steps, args.per_device_train_batch_size, G)
        first //= args.gradient_accumulation_steps
        inner = float(gradient_PN[:first].sum(0) @ gradient_PN[first:].sum(0)) / P**2
        return estimators.moments_of_halves(inner, norm2, (first, P - first))
    plain = estimators.moments(gradient_PN.square().sum(1), norm2)
    scores_PGN, rewards_PG = scores_of(trainer, update), update["generation"].rewards_PG
    scores_PGN = scores_PGN / (args.max_completion_length if args.loss_type == "dr_grpo" else 1)
    valid_PG = ~rewards_PG.isnan()
    corrected = plain.of_rows(
        estimators.own_norm2(scores_PGN @ scores_PGN.transpose(1, 2), rewards_PG, valid_PG), len(PROMPTS)
    )
    assert abs(corrected.trace_cov / plain.trace_cov - 1) > 1e-3
    return corrected


def assert_close(found, wanted, bound=1e-5):
    assert float((found - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"baseline": "oblr", "temperature": 0.7},
        {"baseline": "rloo", "schedule": "off"},
        {"loss_type": "dr_grpo"},
        {"gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "baseline": "rloo"},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "peft_config": LoraConfig(**LORA)},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
        {"peft_config": LoraConfig(**LORA), "gradient_checkpointing": True},
    ],
    ids=["accumulated", "oblr", "rloo", "over a constant", "checkpointed", "halves of groups", "single outputs",
         "halves, rloo", "halves, lora", "at once", "lora checkpointed"],
)  # fmt: skip
def test_the_gradient_is_the_mean_of_advantages_times_scores(tmp_path, given):
    trainer, updates = run(tmp_path, steps=2, **given)
    prior = estimators.Prior() if given.get("baseline") != "oblr" else None
    for update, log in zip(updates, trainer.state.log_history, strict=False):
        gradient_PN = expected(trainer, update, given.get("baseline", "oblr_shrunk"), prior)
        assert_close(-flat(update["grads"]), gradient_PN.mean(0))
        moments = moments_of(trainer, update, gradient_PN)
        # The first half is kept in bfloat16, whose rounding has no direction of its own.
        close = {"rel": 1e-4} if given.get("per_device_train_batch_size", 8) >= G else {"rel": 5e-3}
        assert log["trace_cov"] == pytest.approx(moments.trace_cov, **close)
        assert log["signal2"] == pytest.approx(moments.signal2, rel=1e-3, abs=2e-3 * moments.trace_cov)
        if prior is not None:
            prior.next_step()


@pytest.mark.parametrize(("loss_type", "by_length"), [("grpo", True), ("sapo", True), ("dr_grpo", False)])
def test_a_loss_that_weighs_completions_has_its_weights_squared_in_the_baseline(tmp_path, loss_type, by_length):
    """A mean over tokens divides a score by their number, and the norm that rewards are weighed by, too."""
    words = {"baseline": "oblr", "schedule": "off", "max_completion_length": 12, "lengths": [2, 7, 5, 12, 1]}
    trainer, [update] = run(tmp_path, loss_type=loss_type, **words)
    lengths_PG = torch.cat([part["completion_mask"].sum(1) for part in update["batch"]]).view(-1, G)
    scores_PGN, rewards_PG = scores_of(trainer, update), update["generation"].rewards_PG
    scale_PG = 1 / (lengths_PG if by_length else torch.full_like(lengths_PG, 12)).float()
    share_PGN = scale_PG[..., None] * scores_PGN
    b = estimators.baseline("oblr", rewards_PG, norm2_PG=share_PGN.square().sum(2))
    assert_close(-flat(update["grads"]), ((rewards_PG - b)[..., None] * share_PGN).mean((0, 1)))


def test_a_proxy_weighs_rewards_where_no_look_was_taken(tmp_path):
    """What it has learned is of looks before; a step without one has no exact norm."""
    trainer, updates = run(tmp_path, steps=7, baseline="oblr", look_steps=10, schedule="off")
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert ["score_norm2/mean" in log for log in logs] == [True] * 5 + [False] * 2
    proxy = CalibratedProxy()
    for index, update in enumerate(updates):
        scores_PGN, generation = scores_of(trainer, update), update["generation"]
        norm2_PG = scores_PGN.square().sum(2)
        batch = {name: torch.cat([part[name] for part in update["batch"]]) for name in MASKED}
        rows = trainer._advantages._features(sequences_of(batch))
        weight_PG = norm2_PG if index < 5 else proxy.predict(rows).view_as(norm2_PG)
        b = estimators.baseline("oblr", generation.rewards_PG, norm2_PG=weight_PG)
        torch.testing.assert_close(generation.baseline_PG, b, rtol=1e-4, atol=1e-5)
        assert_close(-flat(update["grads"]), ((generation.rewards_PG - b)[..., None] * scores_PGN).mean((0, 1)), 1e-4)
        if index < 5:
            proxy.observe(rows, norm2_PG.flatten(), G)


def test_halves_are_whole_groups():
    assert [first_half(*each) for each in [(2, 8, 4), (3, 4, 4), (6, 2, 4), (8, 1, 4), (5, 4, 4)]] == [1, 1, 2, 4, 2]
    assert [first_half(*each) for each in [(1, 8, 4), (2, 2, 4), (3, 2, 4), (2, 6, 4)]] == [0, 0, 0, 0]


def test_a_model_of_images_trains_on_text_with_its_tokenizer(tmp_path):
    """Its processor is refused, and the message names the cure, which works: what only images pass stays as it is."""
    policy = tiny_policy()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=len(policy.tokenizer) + 1, eos_token_id=policy.tokenizer.eos_token_id, **small)
    images = CLIPVisionConfig(image_size=8, patch_size=4, **small)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=images, text_config=text, image_token_id=len(policy.tokenizer))
    )
    with pytest.raises(InputError, match=r"processing_class=AutoTokenizer"):
        ours(
            tmp_path,
            Policy(model, LlavaProcessor(CLIPImageProcessorPil(), tokenizer=policy.tokenizer, image_token="a")),
        )
    trainer, [update] = run(tmp_path, policy=Policy(model, policy.tokenizer), baseline="oblr")
    used = [name for name, _ in model.named_parameters() if name in update["grads"]]
    assert used
    assert not any("vision" in name for name in used)
    parts = zip(model.named_parameters(), expected(trainer, update, "oblr").mean(0).split(
        [p.numel() for p in model.parameters()]), strict=True)  # fmt: skip
    wanted = {name: part for (name, _), part in parts}
    assert_close(-flat(update["grads"]), torch.cat([wanted.pop(name) for name in update["grads"]]))
    assert not any(part.any() for part in wanted.values())


def test_in_float64_the_gradient_is_exact(tmp_path):
    """But for advantages, which TRL has in float32."""
    trainer, [update] = run(tmp_path, policy=tiny_policy(torch.float64), baseline="oblr")
    assert_close(-flat(update["grads"]), expected(trainer, update, "oblr").mean(0), 1e-6)


@pytest.mark.parametrize("baseline", ["oblr", "rloo"])
@pytest.mark.parametrize(
    "given",
    [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}],
    ids=["groups", "halves of groups"],
)
def test_rewards_that_are_missing_leave_the_mean_as_it_is(tmp_path, baseline, given):
    """Outputs without a reward have the advantage 0, and weigh nothing in the others' baselines."""

    def missing(prompts, completions, **_):
        return [None if index % 4 == 1 else float(len(set(each))) for index, each in enumerate(completions)]

    trainer, [update] = run(tmp_path, reward_funcs=missing, baseline=baseline, **given)
    scores_PGN, rewards_PG = scores_of(trainer, update), update["generation"].rewards_PG
    valid_PG = ~rewards_PG.isnan()
    assert not valid_PG[:, 1].any()
    norm2_PG = scores_PGN.square().sum(2)
    b = estimators.baseline(baseline, rewards_PG, valid_PG=valid_PG, norm2_PG=norm2_PG)
    gradient_PN = (torch.where(valid_PG, rewards_PG - b, 0)[..., None] * scores_PGN).mean(1)
    assert_close(-flat(update["grads"]), gradient_PN.mean(0))
    log, P = trainer.state.log_history[0], len(gradient_PN)
    assert log["completions/masked_ratio"] == 0.25
    if not given:
        plain = estimators.moments(gradient_PN.square().sum(1), float(gradient_PN.mean(0).square().sum()))
        own2 = estimators.own_norm2(scores_PGN @ scores_PGN.transpose(1, 2), rewards_PG, valid_PG)
        moments = plain.of_rows(own2 * (3 / 4) ** 2, len(PROMPTS))  # TRL's mean is over all outputs
        assert log["trace_cov"] == pytest.approx(moments.trace_cov, rel=1e-4)
    assert P == 4 if not given else P == 2


def test_a_prompt_without_any_reward_has_the_gradient_0_in_the_noise_that_looks_tell(tmp_path):
    """An update without halves, whose signal is that of all prompts' own norms, is made all the same."""

    def missing(prompts, completions, **_):
        return [None if row < G else float(len(set(text))) for row, text in enumerate(completions)]

    words = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "baseline": "oblr"}
    trainer, [update] = run(tmp_path, reward_funcs=missing, **words)
    scores_PGN, rewards_PG = scores_of(trainer, update), update["generation"].rewards_PG
    valid_PG = ~rewards_PG.isnan()
    assert valid_PG.any(1).tolist() == [False, True, True, True]
    b = estimators.baseline("oblr", rewards_PG, valid_PG=valid_PG, norm2_PG=scores_PGN.square().sum(2))
    gradient_PN = (torch.where(valid_PG, rewards_PG - b, 0)[..., None] * scores_PGN).mean(1)
    assert_close(-flat(update["grads"]), gradient_PN.mean(0))
    own2 = estimators.own_norm2(scores_PGN @ scores_PGN.transpose(1, 2), rewards_PG, valid_PG)
    moments = estimators.moments(gradient_PN.square().sum(1), float(gradient_PN.mean(0).square().sum()))
    log = trainer.state.log_history[0]
    assert log["trace_cov"] == pytest.approx(moments.of_rows(own2 * 3 / 4, len(PROMPTS)).trace_cov, rel=1e-4)
    assert log["skipped"] == 0


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_one_completion_in_so_many_is_scored_after_the_update_in_micro_batches_of_any_size(tmp_path, rows):
    """Those of the whole update that have the number 0, 4, 8 ..."""
    words = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 12 // rows, "num_generations": 6}
    trainer = ours(tmp_path, max_steps=1, **words)
    watch, seen = trainer._update.watch, []
    trainer._update.watch = lambda: (change := watch(), seen.append(change()))[0]
    trainer.train()
    assert len(seen[0]) == 3
    assert not seen[0].abs().max() > 1e-5  # before the update nothing has changed
    assert trainer.state.log_history[0]["step_kl"] > 0


@pytest.mark.parametrize("schedule", ["auto", "debiased", "off"])
@pytest.mark.parametrize("baseline", ["rloo", "oblr_shrunk"])
def test_no_information_no_step(tmp_path, baseline, schedule):
    """Rewards of which none differs, after steps that had a signal: weights, optimizer, schedule and prior stay."""
    calls, seen = [], []

    def constant_from_the_third_step(prompts, completions, **_):
        calls.append(1)
        return [0.37] * len(completions) if 2 < len(calls) < 6 else reward(prompts, completions)

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
            weights = [p.detach().clone() for p in model.parameters()]
            moments = [each["exp_avg"].clone() for each in trainer.optimizer.state.values()]
            states = trainer._schedule.state_dict(), trainer._advantages.state_dict()
            seen.append((weights, moments, str(states)))

    trainer = ours(
        tmp_path, max_steps=6, reward_funcs=constant_from_the_third_step, baseline=baseline, schedule=schedule,
        weight_decay=0.1, callbacks=[Looks()], lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    assert len(calls) == 6

    def same(one, other):
        return all(map(torch.equal, one[0] + one[1], other[0] + other[1])) and one[2] == other[2]

    assert [same(one, other) for one, other in pairwise(seen)] == [False, True, True, True, False]
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["skipped"] for log in logs] == [0, 0, 1, 1, 1, 0]
    for log in logs[2:5]:
        assert [log[key] for key in ("learning_rate", "lr_factor", "n_snr", "grad_norm", "signal2")] == [0] * 5
        assert log["entropy"] > 0
        assert "step_kl" not in log
    if schedule == "auto":
        assert 0.5 < logs[5]["learning_rate"] / logs[1]["learning_rate"] < 3  # the growth of one step


def test_prompts_that_agree_with_themselves_alone_make_a_step_of_no_gradient(tmp_path):
    """Under leave-one-out their gradient is 0: nothing moves, and nothing is called skipped."""
    own = lambda prompts, completions, **_: [float(prompt[0]) for prompt in prompts]  # noqa: E731
    trainer, _ = run(tmp_path, steps=2, reward_funcs=own, baseline="rloo", weight_decay=0.1)
    fresh = tiny_policy().model.state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in trainer.model.state_dict().items())
    assert not trainer.optimizer.state
    assert [trainer.state.log_history[1][key] for key in ("learning_rate", "n_snr", "skipped")] == [0, 0, 0]


def test_clipping_and_the_logs_see_gradients_as_they_are(tmp_path):
    """Whose size falls to a third from step to step: the optimizer gets them in units of it."""
    calls, got = [], []

    def shrinking(prompts, completions, **_):
        calls.append(1)
        return [each / 3 ** len(calls) for each in reward(prompts, completions)]

    class Looks(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            def look(*_):
                got.append(float(flat({name: p.grad for name, p in model.named_parameters()}).norm()))

            trainer._schedule.optimizer.register_step_pre_hook(look)

    trainer = ours(
        tmp_path, max_steps=4, max_grad_norm=0.2, baseline="rloo", reward_funcs=shrinking, callbacks=[Looks()]
    )
    captured = Capture(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    norms = [float(expected(trainer, update, "rloo").mean(0).norm()) for update in captured.updates]
    assert [log["grad_norm"] for log in logs] == pytest.approx(norms, rel=1e-4)
    clipped = [float(flat(update["grads"]).norm()) for update in captured.updates]
    assert clipped == pytest.approx([min(norm, 0.2) for norm in norms], rel=1e-4)
    assert got[0] == pytest.approx(0.2, rel=1e-4)
    assert got[3] > 5 * norms[3]

"""The gradient that the optimizer sees against loop autograd, the library's functions and TRL's own loss."""

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
from trl import GRPOTrainer

from oblrpo import estimators
from oblrpo.adapters.trl.gradient import sequences_of
from oblrpo.adapters.trl.taped import drawn
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.scores import CalibratedProxy, Features
from tests.trl.support import PROMPTS, Capture, flat, ours, reward, scores, tiny_policy

G = 4
MASKED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "rewards")


def run(tmp_path, steps=1, **given):
    """A trained policy and what its updates were made of."""
    policy = given.pop("policy", None) or tiny_policy()
    trainer = ours(tmp_path, policy, max_steps=steps, **given)
    captured = Capture(trainer)
    trainer.train()
    return trainer, captured.updates


def policy_of(trainer, update):
    """The policy as it was before an update; a copy would not do, whose forward TRL has bound to the original."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(update["weights"][name])
    return trainer._policy


def expected(trainer, update, name, prior=None):
    """Advantages from exact norms by loop autograd, and the mean over sequences of A grad log pi, per prompt too."""
    before, batch = policy_of(trainer, update), {k: torch.cat([part[k] for part in update["batch"]]) for k in MASKED}
    prompts_PGQ = batch["prompt_ids"].unflatten(0, (-1, G))
    assert (prompts_PGQ == prompts_PGQ[:, :1]).all()
    scores_SN = scores(before, batch, trainer.temperature)
    rewards_PG, norm2_PG = batch["rewards"].view(-1, G), scores_SN.square().sum(1).view(-1, G)
    b = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG, prior=prior)
    if prior is not None:
        prior.observe(rewards_PG, norm2_PG)
    return ((rewards_PG - b)[..., None] * scores_SN.view(*rewards_PG.shape, -1)).mean(1)


def moments_of(trainer, update, gradient_PN, step):
    """Those of a data set of `PROMPTS`, none of which is in a batch twice; of which one, drawn, is looked at."""
    plain = estimators.moments(gradient_PN.square().sum(1), gradient_PN.mean(0).square().sum())
    if trainer.args.per_device_train_batch_size < G:  # no prompt goes through the model as a whole
        return plain
    rewards_PG = torch.cat([part["rewards"] for part in update["batch"]]).view(-1, G).double()
    valid_PG = ~rewards_PG.isnan()
    [place] = drawn(rewards_PG, valid_PG, step).nonzero()[0].tolist()
    chosen = {name: torch.cat([part[name] for part in update["batch"]])[G * place :][:G] for name in MASKED}
    score_GN = scores(policy_of(trainer, update), chosen, trainer.temperature)
    own2 = estimators.own_norm2((score_GN @ score_GN.T)[None], chosen["rewards"][None], valid_PG[[place]])
    own2 *= float(valid_PG[place].double().mean()) ** 2  # TRL's mean is over all outputs, those that do not count too
    square_P = (rewards_PG - rewards_PG.nanmean(1, keepdim=True)).square().nansum(1)
    own2 *= float(square_P.mean() / square_P[place])  # over the chance of its being drawn, in the mean of all
    corrected = plain.of_rows(own2, len(PROMPTS))
    assert abs(corrected.trace_cov / plain.trace_cov - 1) > 1e-3
    return corrected


def assert_close(found, wanted, bound=1e-5):
    assert float((found - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"baseline": "oblr", "temperature": 0.7, "score_method": "gram"},
        {"baseline": "rloo", "schedule": "off"},
        {"gradient_checkpointing": True},
        {"score_method": "two_pass"},
        {"score_method": "two_pass", "baseline": "oblr", "gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "baseline": "rloo"},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
         "peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
        {"peft_config": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")},
        {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
         "gradient_checkpointing": True},
    ],
    ids=["accumulated", "gram", "rloo", "checkpointed", "two passes", "two checkpointed passes",
         "halves of groups", "single outputs", "halves, rloo", "halves, lora", "at once", "lora", "lora checkpointed"],
)  # fmt: skip
def test_the_gradient_is_the_mean_of_advantages_times_scores(tmp_path, given):
    trainer, updates = run(tmp_path, steps=2, **given)
    prior = estimators.Prior(past_only=True) if given.get("baseline") != "oblr" else None
    for step, (update, log) in enumerate(zip(updates, trainer.state.log_history, strict=False)):
        gradient_PN = expected(trainer, update, given.get("baseline", "oblr_shrunk"), prior)
        assert_close(-flat(update["grads"]), gradient_PN.mean(0))
        moments = moments_of(trainer, update, gradient_PN, step)
        assert log["trace_cov"] == pytest.approx(moments.trace_cov, rel=1e-4)
        assert log["signal2"] == pytest.approx(moments.signal2, rel=1e-3, abs=1e-6 * moments.trace_cov)
        if prior is not None:
            prior.next_step()


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
    trainer, [update] = run(tmp_path, policy=tiny_policy(torch.float64), baseline="oblr")
    assert_close(-flat(update["grads"]), expected(trainer, update, "oblr").mean(0), 1e-9)


def test_trl_s_own_loss_has_this_gradient_under_these_advantages(tmp_path):
    """The formula that TRL's `luspo` computes by autograd through its fused head, fed with our advantages."""
    trainer, [update] = run(tmp_path)
    policy_of(trainer, update).model.train()
    trainer.model.zero_grad()
    shown = iter(torch.tensor(list(trainer._logs["advantages"])).split(8))
    trainer.current_gradient_accumulation_steps = 2
    for batch in update["batch"]:
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, batch | {"advantages": next(shown).float()})
        loss.backward()
    assert_close(flat(update["grads"]), flat({n: p.grad for n, p in trainer.model.named_parameters()}))


@pytest.mark.parametrize("baseline", ["oblr", "rloo"])
@pytest.mark.parametrize(
    "given",
    [{}, {"score_method": "two_pass"}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}],
    ids=["one pass", "two passes", "halves of groups"],
)
def test_rewards_that_are_missing_leave_the_mean_as_it_is(tmp_path, baseline, given):
    """Outputs without a reward have the advantage 0, and weigh nothing in the others' baselines."""

    def missing(prompts, completions, **_):
        return [None if index % 4 == 1 else float(len(set(each))) for index, each in enumerate(completions)]

    trainer, [update] = run(tmp_path, reward_funcs=missing, baseline=baseline, **given)
    scores_SN = torch.cat([scores(policy_of(trainer, update), batch) for batch in update["batch"]])
    rewards_PG = torch.cat([batch["rewards"] for batch in update["batch"]]).view(-1, G)
    valid_PG = ~rewards_PG.isnan()
    assert not valid_PG[:, 1].any()
    norm2_PG = scores_SN.square().sum(1).view(-1, G)
    b = estimators.baseline(baseline, rewards_PG, valid_PG=valid_PG, norm2_PG=norm2_PG)
    advantages_PG = torch.where(valid_PG, rewards_PG - b, 0)
    gradient_PN = (advantages_PG[..., None] * scores_SN.view(*rewards_PG.shape, -1)).mean(1)
    assert_close(-flat(update["grads"]), gradient_PN.mean(0))
    log, moments = trainer.state.log_history[0], moments_of(trainer, update, gradient_PN, 0)
    assert log["completions/masked_ratio"] == 0.25
    assert log["trace_cov"] == pytest.approx(moments.trace_cov, rel=1e-4)
    assert log["signal2"] == pytest.approx(moments.signal2, rel=1e-3, abs=1e-6 * moments.trace_cov)


@pytest.mark.parametrize(
    "given",
    [{}, {"score_method": "two_pass"}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}],
    ids=["one pass", "two passes", "halves of groups"],
)
def test_calibrated_weights_predict_before_they_learn(tmp_path, given):
    """The first step weighs by length; the next one by what the first one's exact norms taught."""
    words = {"score_norms": "calibrated", "calibration_steps": 5, "baseline": "oblr", **given}
    trainer, updates = run(tmp_path, steps=2, **words)
    proxy, log = CalibratedProxy(), trainer.state.log_history
    for update in updates:
        before = policy_of(trainer, update)
        with torch.no_grad():
            found = [before.logps(sequences_of(batch)) for batch in update["batch"]]
        features = Features.join([each.features for each in found])
        scores_SN = torch.cat([scores(before, batch) for batch in update["batch"]])
        rewards_PG = torch.cat([batch["rewards"] for batch in update["batch"]]).view(-1, G)
        b = estimators.baseline("oblr", rewards_PG, norm2_PG=proxy.predict(features).view(-1, G))
        assert_close(-flat(update["grads"]), ((rewards_PG - b).flatten()[:, None] * scores_SN).mean(0))
        if not proxy.observed:
            proxy.observe(features, scores_SN.square().sum(1), G)
    assert "score_norm2/mean" in log[0]
    assert "score_norm2/mean" not in log[1]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_one_completion_in_so_many_is_scored_after_the_update_in_micro_batches_of_any_size(tmp_path, rows):
    """Those of the whole update that have the number 0, 4, 8 ..."""
    words = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 12 // rows, "num_generations": 6}
    trainer = ours(tmp_path, max_steps=1, **words)
    watch, seen = trainer._gradient.watch, []
    trainer._gradient.watch = lambda: (change := watch(), seen.append(change()))[0]
    trainer.train()
    assert len(seen[0]) == 3
    assert not seen[0].abs().max() > 1e-5  # before the update nothing has changed
    assert trainer.state.log_history[0]["step_kl"] > 0


@pytest.mark.parametrize("given", [{"baseline": "rloo"}, {"baseline": "oblr", "score_method": "two_pass"}])
def test_rows_of_like_length_share_a_forward_with_norms_or_without(tmp_path, monkeypatch, given):
    """So that rows without norms are not padded more than those with them; the gradient is the same."""
    trainer = ours(tmp_path, tiny_policy(torch.float64), max_steps=1, schedule="off", **given)
    trainer._generate_single_turn = lambda prompts, *_: ([[80] * (1 + row % 8) for row in range(len(prompts))], None)
    captured, widths, logps = Capture(trainer), [], Policy.logps

    def seen(self, sequences, *others):
        widths.append(sequences.ids_ST.shape[1])
        return logps(self, sequences, *others)

    monkeypatch.setitem(vars(trainer._policy), "tokens_of_a_forward", 0)  # no slice is too small
    monkeypatch.setattr(Policy, "logps", seen)
    trainer.train()
    [update] = captured.updates
    assert widths[:8] == list(range(10, 2, -1))
    assert_close(-flat(update["grads"]), expected(trainer, update, given["baseline"]).mean(0), 1e-6)


def test_an_update_that_ends_within_a_group_is_refused(tmp_path):
    """Half of a group would otherwise be lost, in silence."""
    trainer = ours(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, baseline="rloo")
    add = trainer._gradient.add

    def and_forget_one(*given):
        found = add(*given)
        if len(trainer._gradient.parts) == 4:
            trainer._gradient.parts.pop()
        return found

    trainer._gradient.add = and_forget_one
    with pytest.raises(InputError, match="ends within a group"):
        trainer.train()


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
            states = trainer._schedule.state_dict(), trainer._gradient.state_dict()
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

"""What the settings of TRL, verl, OpenRLHF and NeMo RL are called here."""

import pytest

from oblrpo.cli.evaluate import EvaluateCommand
from oblrpo.errors import InputError
from oblrpo.settings import TrainConfig, every_value, flatten, hint, may_change_on_resume, with_settings
from oblrpo.settings.reading import CALLED, NOT_HERE
from oblrpo.settings.typed import settings_of

OURS = set(flatten(TrainConfig()))


def test_every_name_that_is_pointed_to_is_there_and_no_name_of_ours_is_shadowed():
    asked = {setting.name for setting in settings_of(EvaluateCommand())}
    pointed = [key.partition(",")[0].split("|") for key in CALLED]
    assert {name for names in pointed for name in names} <= OURS | asked | {"resume"}
    assert all(set(names[1:]) <= asked for names in pointed)
    for table in (CALLED, NOT_HERE):
        names = " ".join(table.values()).split()
        assert len(set(names)) == len(names)
        assert not set(names) & OURS


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rollout.n", "Use --num-generations."),
        ("actor_rollout_ref.rollout.n", "Use --num-generations."),
        ("actor_rollout_ref.actor.optim.lr", "Use --learning-rate."),
        ("critic.optim.lr", "There is no such setting: a baseline takes the place of a critic."),
        ("actor_rollout_ref.model.path", "Use --model."),
        ("critic.model.path", "the place of a critic"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "a run uses one device"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "Use --eval-samples."),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "samples of the policy itself"),
        ("reward.custom_reward_function.path", "Use --rewards, such as my.py:function."),
        ("trainer.default_local_dir", "Use --output."),
        ("policy.temperature", "Use --temperature."),
        ("num_train_epochs", "Use --steps, of prompts_per_step rows each; there are no epochs."),
        ("N_Samples_Per_Prompt", "Use --num-generations."),
        ("logging_steps", "There is no such setting: every step is logged."),
        ("loss_fn.reference_policy_kl_penalty", "Use --beta."),
        ("grpo.num_prompts_per_step", "Use --prompts-per-step, which counts prompts."),
        ("rollout.n_samples", "Use --num-generations."),
        ("prompt", "Use --prompt-column."),
        ("answer", "Use --answer-column."),
        (
            "overwrite_output_dir",
            "There is no such setting: a run's folder is never overwritten; give another `output`.",
        ),
        ("lora_r", "Use --lora, such as '{r: 16}'."),
        ("vllm_gpu_memory_utilization", "Use --vllm-args, such as '{gpu_memory_utilization: 0.4}'."),
        ("extra", ""),  # close to no setting: beta is two letters of it
        ("sample_per_prompt_system", ""),
    ],
)
def test_names_of_other_trainers(name, words):
    said = hint(name, OURS, "--")
    assert said.endswith(words) if words.startswith(("Use", "Did")) else words in said
    assert bool(said) == bool(words)


def test_a_name_means_another_setting_of_evaluate():
    asked = {setting.name for setting in settings_of(EvaluateCommand())}
    assert hint("n_samples", asked, "--") == " Use --samples."
    assert hint("batch_size", asked, "--") == " Use --problems-per-batch, which counts prompts."
    assert hint("max_samples", asked, "--") == " Use --limit."
    assert "select some" in hint("max_samples", OURS, "--")


def test_a_flag_is_written_as_a_flag():
    assert hint("output_dir", OURS, "--") == " Use --output."
    assert hint("max_completion_lenght", OURS, "--") == " Did you mean '--max-completion-length'?"
    assert hint("qqqq", OURS) == ""


def test_keys_of_a_mapping_are_typed_bounded_and_compared_one_by_one():
    config = with_settings(TrainConfig(), {"vllm_args": {"gpu_memory_utilization": 0.4}}, "here")
    assert every_value(config)["vllm_args.gpu_memory_utilization"] == 0.4
    assert every_value(config)["vllm_args.dtype"] == "auto"
    assert "vllm_args.gpu_memory_utilization" in may_change_on_resume(config)
    assert "vllm_args.dtype" not in may_change_on_resume(config)
    same = with_settings(config, {"model_args": {"hidden_size": 64}}, "here")
    assert every_value(same) == every_value(config)  # which is the default
    with pytest.raises(InputError, match=r"vllm_args has no 'dtpye'.* Did you mean 'dtype'\?"):
        every_value(with_settings(config, {"vllm_args": {"dtpye": "float32"}}, "here"))

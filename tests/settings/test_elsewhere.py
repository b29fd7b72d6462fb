"""What TRL's settings are called here."""

import pytest

from oblrpo.errors import InputError
from oblrpo.runs import RunFolder
from oblrpo.settings import TrainConfig, every_value, flatten, hint, lost, may_change_on_resume, with_settings
from oblrpo.settings.elsewhere import GONE, GONE_VALUES, NAMED_BY_OTHERS, NAMED_HERE, NOT_HERE

OURS = set(flatten(TrainConfig()))


def test_every_name_that_is_pointed_to_is_there_and_no_name_of_ours_is_shadowed():
    assert {*NAMED_HERE.values(), *NAMED_BY_OTHERS.values()} <= OURS | {"resume"}
    assert not (set(NAMED_HERE) | set(NAMED_BY_OTHERS) | set(NOT_HERE)) & OURS


def test_a_flag_is_written_as_a_flag():
    assert hint("output_dir", OURS, "--") == " TRL's --output-dir is --output here."
    assert hint("max_completion_lenght", OURS, "--") == " Did you mean '--max-completion-length'?"
    assert hint("qqqq", OURS) == ""


def test_what_is_gone_is_told_by_name_and_is_no_setting():
    assert not set(GONE) & OURS
    assert {setting for setting, _ in GONE_VALUES} <= OURS
    assert hint("schedule_kl_every", OURS, "--") == (
        " --schedule-kl-every is gone: an update is measured on one completion of four."
    )
    assert lost("train_on", 0.3) == " 0.3 is gone: compute-optimal chooses how many completions are drawn."
    assert lost("train_on", "exact") == lost("steps", "0.3") == ""


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("lora_r: 8\n", "unknown setting 'lora_r'.*lora_r is gone: write `lora` {r: 16}"),
        ("prior_memory: 0.8\n", "unknown setting 'prior_memory'.*prior_memory is gone: an earlier step counts 0.8"),
    ],
)
def test_a_run_of_an_earlier_version_is_refused_with_what_is_gone(tmp_path, written, words):
    (tmp_path / "config.yaml").write_text("steps: 3\n" + written)
    with pytest.raises(InputError, match=words):
        RunFolder(tmp_path).saved_config()


def test_keys_of_a_mapping_are_typed_bounded_and_compared_one_by_one():
    config = with_settings(TrainConfig(), {"vllm_args": {"gpu_memory_utilization": 0.4}}, "here")
    assert every_value(config)["vllm_args.gpu_memory_utilization"] == 0.4
    assert every_value(config)["vllm_args.dtype"] == "bfloat16"
    assert "vllm_args.gpu_memory_utilization" in may_change_on_resume(config)
    assert "vllm_args.dtype" not in may_change_on_resume(config)
    same = with_settings(config, {"model_args": {"hidden_size": 64}}, "here")
    assert every_value(same) == every_value(config)  # which is the default
    with pytest.raises(InputError, match=r"vllm_args has no 'dtpye'.* Did you mean 'dtype'\?"):
        every_value(with_settings(config, {"vllm_args": {"dtpye": "float32"}}, "here"))

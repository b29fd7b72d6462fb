"""What TRL's settings are called here."""

from oblrpo.settings import TrainConfig, flatten, hint
from oblrpo.settings.elsewhere import NAMED_HERE, NOT_HERE

OURS = set(flatten(TrainConfig()))


def test_every_name_that_is_pointed_to_is_there_and_no_name_of_ours_is_shadowed():
    assert set(NAMED_HERE.values()) <= OURS | {"resume"}
    assert not (set(NAMED_HERE) | set(NOT_HERE)) & OURS


def test_a_flag_is_written_as_a_flag():
    assert hint("output_dir", OURS, "--") == " TRL's --output-dir is --output here."
    assert hint("max_completion_lenght", OURS, "--") == " Did you mean '--max-completion-length'?"
    assert hint("qqqq", OURS) == ""

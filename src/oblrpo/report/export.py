"""A folder to share: the model of a run with its card, and nothing that only training needs."""

import json
import os
import shutil
from pathlib import Path

from oblrpo.checksums import SUMS
from oblrpo.errors import InputError
from oblrpo.objects import PREFIX
from oblrpo.report.model_card import model_card
from oblrpo.report.record import RunRecord, read_run
from oblrpo.runs import write_atomically
from oblrpo.settings import PolicyConfig

ADAPTERS = "adapter_config.json"
OF_LOADING = ("dtype", "load_in_4bit", "trust_remote_code")
"""The settings of a run under which the model beneath its adapters is loaded again."""


def export(run: Path, output: Path | None = None, step: int | None = None, merge: bool = False) -> Path:
    """Write the model of a run into a folder that transformers and the hub take as it is, with a model card.

    Args:
        run: folder of the run.
        output: folder to write, which must not be there yet; None for RUN/export.
        step: the step of the checkpoint; None for the newest.
        merge: add adapters to the weights of their model.

    Returns:
        The folder: safetensors, config, tokenizer, and README.md, the model card.

    Raises:
        InputError: the run has no such checkpoint, or it is damaged; the output is there; `merge` without adapters.
    """
    record = read_run(run)
    if record is None:
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step; give the folder of a run."
        )
    checkpoint, reached = _checkpoint(record, step)
    output = output or run / "export"
    if os.path.lexists(output):
        raise InputError(f"{output} already exists; give another --output, or remove it.")
    adapters = (checkpoint / ADAPTERS).is_file()
    if merge and not adapters:
        raise InputError(f"{checkpoint} holds a whole model, and no adapters to merge; leave out --merge.")
    base = _base(str(record.settings.get("model") or ""), checkpoint)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if merge:
            _merge(record, checkpoint, partial)
        else:
            shutil.copytree(checkpoint, partial, ignore=shutil.ignore_patterns("oblrpo_state.*", SUMS, "README.md"))
        name = record.folder.path.resolve().name
        write_atomically(partial / "README.md", model_card(record, reached, name, base, adapters and not merge))
        partial.rename(output)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there once it has its name
    return output


def _checkpoint(record: RunRecord, step: int | None) -> tuple[Path, int]:
    """The checkpoint of a step, whole, and the step."""
    steps = record.folder.checkpoint_steps()
    if not steps:
        raise InputError(f"{record.folder.path} holds no checkpoint; train with --save-steps.")
    reached = steps[-1] if step is None else step
    if reached not in steps:
        raise InputError(
            f"{record.folder.path} has no checkpoint of step {reached}; choose one of: {', '.join(map(str, steps))}."
        )
    if wrong := record.folder.wrong_with(reached):
        raise InputError(f"{record.folder.checkpoint(reached)} is damaged ({wrong}); give another --step.")
    return record.folder.checkpoint(reached), reached


def _merge(record: RunRecord, checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint of adapters with these added to its weights."""
    from oblrpo.policy import load_policy  # torch and transformers load only now

    of_loading = {name: record.settings[name] for name in OF_LOADING if name in record.settings}
    load_policy(str(checkpoint), PolicyConfig(**of_loading), train=False).save_merged(folder)


def _base(model: str, checkpoint: Path) -> str:
    """The name on the hub of the model that was trained; empty if it was a folder, a file or an object."""
    from oblrpo.policy.files import LOCAL, is_gguf

    adapters = checkpoint / ADAPTERS
    known = json.loads(adapters.read_text("utf-8")).get("base_model_name_or_path") if adapters.is_file() else model
    name = str(known or "")
    here = name.startswith((*LOCAL, PREFIX, ".")) or is_gguf(name) or name.count("/") > 1 or Path(name).exists()
    return "" if here else name

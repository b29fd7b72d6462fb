"""A folder to share: the model of a run with its card, and nothing that only training needs."""

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from oblrpo.checksums import SUMS, read_sums
from oblrpo.errors import InputError
from oblrpo.report.model_card import model_card
from oblrpo.report.record import read_run
from oblrpo.runs import RunFolder, check_name, locked, sync_folder, write_atomically
from oblrpo.settings import PolicyConfig

ADAPTERS = "adapter_config.json"
OF_LOADING = ("dtype", "load_in_4bit", "trust_remote_code")
"""The settings of a run under which the model beneath its adapters is loaded again."""
TRIES = 5
"""How many checkpoints a run in progress may remove while they are copied."""


def export(run: Path, output: Path | None = None, step: int | None = None, merge: bool = False) -> Path:
    """Write the model of a run into a folder that transformers and the hub take as it is, with a model card.

    Return that folder, by default RUN/export, which must not be there yet. `step` is that of the checkpoint, the newest
    for None; `merge` adds adapters to the weights of their model.
    """
    record = read_run(run)
    if record is None:
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step; give the folder of a run."
        )
    checkpoint = record.folder.checkpoint(record.folder.reached(step))
    if merge and not (checkpoint / ADAPTERS).is_file() and checkpoint.is_dir():
        raise InputError(f"{checkpoint} holds a whole model, and no adapters to merge; leave out --merge.")
    output = run / "export" if output is None else output
    check_name(output)
    if os.path.lexists(output):
        raise InputError(f"{output} already exists; give another --output, or remove it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with (
            locked(output, keep=False),
            TemporaryDirectory(prefix=".", suffix=".partial", dir=output.parent, ignore_cleanup_errors=True) as side,
        ):
            model, merged = Path(side) / "model", Path(side) / "merged"
            reached = _copy(record.folder, step, model)
            adapters = (model / ADAPTERS).is_file()
            base = _base(str(record.settings.get("model") or ""), model)
            if merge:
                from oblrpo.policy import load_policy  # torch and transformers load only now

                of_loading = {name: record.settings[name] for name in OF_LOADING if name in record.settings}
                whole = load_policy(str(model), PolicyConfig(**of_loading), train=False, dequantise=True)
                whole.save_merged(merged)
            shared, name = merged if merge else model, record.folder.path.resolve().name
            write_atomically(shared / "README.md", model_card(record, reached, name, base, adapters and not merge))
            sync_folder(shared)
            shared.rename(output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", "") or error
        raise InputError(f"cannot export {run} to {output}: {reason}.") from None
    return output


def _copy(folder: RunFolder, step: int | None, target: Path) -> int:
    """Copy the model of a checkpoint, as its checksums have it, and return the step.

    A run in progress may remove the checkpoint meanwhile: the newest is then another.
    """
    from oblrpo.runs.state_files import STATE, TENSORS

    for _ in range(TRIES):
        reached = folder.reached(step)
        checkpoint, wrong = folder.checkpoint(reached), ""
        try:
            for name in {SUMS, *read_sums(checkpoint)} - {TENSORS}:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint / name, target / name)
            wrong = folder.wrong_with(reached, target)
        except FileNotFoundError as error:
            wrong = f"{Path(error.filename).name} is missing"
        except InputError as error:
            wrong = str(error)
        if not wrong:
            for name in (SUMS, STATE):
                (target / name).unlink()
            return reached
        if checkpoint.is_dir():  # it has not been removed: it is damaged
            raise InputError(f"{checkpoint} is damaged ({wrong}); give another --step.")
        shutil.rmtree(target, ignore_errors=True)
    raise InputError(
        f"{folder.path} has removed {TRIES} checkpoints while they were being copied; raise its save_total_limit, or "
        "export after it has ended."
    )


def _base(model: str, checkpoint: Path) -> str:
    """The name on the hub of the model that was trained; empty if it was a folder, a file or an object."""
    from oblrpo.policy.files import LOCAL, is_gguf

    adapters = checkpoint / ADAPTERS
    known = json.loads(adapters.read_text("utf-8")).get("base_model_name_or_path") if adapters.is_file() else model
    name = str(known or "")
    named = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII)
    here = name.startswith(LOCAL) or is_gguf(name) or Path(name).exists()
    return name if named and not here else ""

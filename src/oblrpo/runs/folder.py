"""The folder a run leaves behind: config and identity, one line of metrics a step, completions, checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oblrpo.checksums import damage, has_valid_checksum, with_checksum, write_sums
from oblrpo.errors import InputError
from oblrpo.runs.disk import locked, sync, sync_folder, write_atomically
from oblrpo.runs.rows import Metrics, kept_and_damaged, read_rows, read_steps
from oblrpo.settings import (
    IDENTITY,
    TrainConfig,
    adjustable,
    every_value,
    flatten,
    may_change_on_resume,
    read_yaml_file,
    with_file,
    with_settings,
    yaml_text,
)


@dataclass(frozen=True)
class Identity:
    """A word of the run's own, which each of its checkpoints carries, and what it learns from."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))  # the word, by chance
    sources: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of everything that its settings name and do not hold: data and rewards."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The same of rewards that carry other values since the run used them, such as a count of their calls."""
    about: str = ""
    """What its task is, in a sentence."""

    def plain(self) -> dict[str, Any]:
        """The identity as it stands in `config.yaml`."""
        left = {"left": dict(self.left)} if self.left else {}
        return {"run": self.run, "sources": dict(self.sources)} | left | {"about": self.about}

    @classmethod
    def read(cls, plain: Any, place: str) -> Identity:
        """The identity that `plain` gave."""
        try:
            kinds = (plain["sources"], plain.get("left", {}))
            sources, left = ({str(name): str(sum_) for name, sum_ in kind.items()} for kind in kinds)
            return cls(str(plain["run"]), sources, left, str(plain.get("about", "")))
        except (TypeError, KeyError, AttributeError):
            raise InputError(f"{place}: identity is not what the run wrote; restore it.") from None

    def changed(self, sources: Mapping[str, str]) -> list[str]:
        """Names of the sources that are known and not what they were, or cannot be had any more."""
        known = {name: {digest, self.left.get(name, digest)} for name, digest in self.sources.items()}
        return [name for name, digests in known.items() if sources.get(name) not in digests]

    def resumed(self, sources: Mapping[str, str]) -> Identity:
        """The identity of the run as it resumes with these sources; those that have not changed are kept."""
        changed = self.changed(sources)
        kept = {name: digest for name, digest in self.sources.items() if name not in changed}
        return replace(self, sources={**sources, **kept}, left={})


HELD_OUT = "heldout_"  # how the file of completions of held-out prompts begins


class RunFolder:
    """RUN/: `config.yaml`, `metrics.jsonl`, `completions/step_N.jsonl`, `checkpoints/step_N/`, `report.html`.

    `completions/heldout_step_N.jsonl` has those of held-out prompts, where a step measured them; `heldout_rows.jsonl`
    has the rows of these prompts, where they are the user's; `failure.txt` is there while what ended the run has not
    been fixed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.heldout_rows = path / "heldout_rows.jsonl"
        self.completions = path / "completions"
        self.checkpoints = path / "checkpoints"
        self.failure_file = path / "failure.txt"

    def create(self, config: TrainConfig, identity: Identity | None = None) -> None:
        """Start a new run, also in what one leaves that was killed before it had written its settings."""
        self.make()
        self.write_config(config, identity or Identity())

    def check_new(self) -> None:
        """Refuse a folder that holds something: no run is overwritten."""
        if os.path.lexists(self.path) and not self._never_began():
            if (self.path / ".lock").is_file():
                with suppress(OSError), locked(self.path):  # refused where its writer is still there
                    pass
            resume = "add --resume to continue it, or " if self.config_file.is_file() else ""
            in_python = f"({'resume=True or ' * bool(resume)}output='runs/NAME' in Python)"
            raise InputError(f"{self.path} already exists; {resume}give another --output {in_python}.")

    def make(self) -> None:
        """Make the folders of a new run."""
        self.check_new()
        try:
            self.completions.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create {self.path}: {error.strerror}.") from None

    def _never_began(self) -> bool:
        """Whether this is a folder with nothing but what is there before the first `config.yaml`."""
        folders = {self.completions, self.checkpoints}
        begun = {self.path / ".lock", *self.path.glob(".config.yaml*.partial")}
        return self.path.is_dir() and all(
            (path in folders and path.is_dir() and not any(path.iterdir())) or path in begun
            for path in self.path.iterdir()
        )

    def write_config(self, config: TrainConfig, identity: Identity) -> None:
        """Write the settings to `config.yaml`, and what else identifies the run, under their checksum."""
        text = yaml_text(flatten(config) | {IDENTITY: identity.plain() | {"given": list(config.given)}})
        write_atomically(self.config_file, with_checksum(text))

    def identity(self) -> Identity:
        """What identifies the run among others with the same settings."""
        return Identity.read(read_yaml_file(self.config_file).get(IDENTITY), str(self.config_file))

    def saved_config(self) -> TrainConfig:
        """Return the config that the run was started with; `output` is where the run is now."""
        if not self.config_file.is_file():
            raise InputError(f"{self.path} holds no run to resume (no config.yaml); remove --resume to start one.")
        config = with_file(TrainConfig(), self.config_file)
        return replace(config, run=replace(config.run, output=str(self.path)))

    def adjusted(self, config: TrainConfig) -> TrainConfig:
        """`config` with the numbers that were not set as they were adjusted when the run began."""
        saved = flatten(self.saved_config())
        return with_settings(config, {name: saved[name] for name in adjustable(config)}, "", ())

    def check_resumable(self, config: TrainConfig) -> list[str]:
        """Refuse to resume under settings that would make it another run; return what changes its course, in words."""
        if not has_valid_checksum(self.config_file.read_text("utf-8", errors="replace")):
            raise InputError(
                f"{self.config_file} is not what the run wrote, or lacks its checksum: restore it, or start a new run "
                "from a checkpoint with --model."
            )
        if differences := self.differences(config, course=False):
            raise InputError(f"{self.path} was started with other settings: {differences}; resume with the old ones.")
        course = f"from here on the rate follows its schedule over all steps: {self.differences(config)}."
        return [course] if self.differences(config) else []

    def differences(self, config: TrainConfig, course: bool = True) -> str:
        """The settings that make `config` another run than the one here, in words, or with `course` the rate of one."""
        old, new = every_value(self.saved_config()), every_value(config)
        free = may_change_on_resume(config) | {"recipe"}
        changed = [key for key in new if new[key] != old[key] and key not in free]
        if course and old["steps"] != new["steps"] and new["lr_scheduler_type"] != "constant":
            changed.append("steps")
        return ", ".join(f"{key} (was {old[key]!r}, now {new[key]!r})" for key in changed)

    def write_metrics(self, metrics: Metrics) -> Metrics:
        """Append one step and return it as written: values that are not finite are null, JSON's only word for them."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in metrics.items()
        }
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that is on the disk has its history there
        return clean

    def read_metrics(self) -> list[Metrics]:
        """All complete lines of metrics.jsonl."""
        return read_steps(self.metrics_file) if self.metrics_file.is_file() else []

    def write_failure(self, message: str) -> None:
        """Note what ended the run before its last step; an empty text says that it continues."""
        if message:
            write_atomically(self.failure_file, message + "\n")
        else:
            self.failure_file.unlink(missing_ok=True)

    def failure(self) -> str:
        """What ended the run before its last step; empty if nothing did, or it was stopped or killed."""
        return self.failure_file.read_text("utf-8", "replace").strip() if self.failure_file.is_file() else ""

    def read_completions(self, step: int, of: str = "") -> list[dict[str, Any]]:
        """The completions of a step, or with `HELD_OUT` of held-out prompts; none if they are not there."""
        file = self.completions / f"{of}step_{step}.jsonl"
        return read_rows(file) if file.is_file() else []

    def completion_steps(self, of: str = "") -> list[int]:
        """The steps whose completions `read_completions` has, in order; not those of a step that was cut short."""
        last = max((row["step"] for row in self.read_metrics()), default=-1)
        names = (file.name.removeprefix(f"{of}step_") for file in self.completions.glob(f"{of}step_*.jsonl"))
        steps = (int(name.removesuffix(".jsonl")) for name in names if re.fullmatch(r"[0-9]{1,18}\.jsonl", name))
        return sorted(step for step in steps if step <= last)

    def drop_metrics_after(self, step: int) -> list[str]:
        """Forget steps that no checkpoint holds, and set damaged lines aside; return what is missing, in sentences."""
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1] if self.metrics_file.is_file() else []
        kept, damaged = kept_and_damaged(lines, step)
        missing = []
        if damaged:
            aside = self.path / "metrics.damaged"
            with aside.open("ab") as file:
                file.write(b"".join(line + b"\n" for line in damaged))
                file.flush()
                os.fsync(file.fileno())
            missing.append(f"{len(damaged)} lines of {self.metrics_file} are damaged and were moved to {aside}.")
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
        if absent := step + 1 - len(kept):
            missing.append(f"{self.metrics_file} lacks {absent} of the {step + 1} steps so far.")
        return missing

    def write_completions(self, step: int, rows: list[dict[str, Any]], of: str = "") -> None:
        """Write one line a completion: prompt, completion, reward, baseline, advantage, score norm, length."""
        _write_rows(self.completions / f"{of}step_{step}.jsonl", rows)

    def write_heldout_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows of the held-out prompts, in the form of `data`."""
        _write_rows(self.heldout_rows, rows)

    def save_checkpoint(
        self,
        step: int,
        save_policy: Callable[[Path], None],
        state: dict[str, Any],
        keep: int,
        accuracy: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Write `checkpoints/step_N` whole or not at all; keep the newest `keep`, and that of highest accuracy."""
        from oblrpo.runs.state_files import save_state  # needs torch, which reading a run does not

        target = self.checkpoint(step)
        partial = self.checkpoints / f".step_{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        save_policy(partial)
        save_state(partial, state)
        write_sums(partial)
        _replace(partial, target)
        best = self.best_step(accuracy)
        for old in self.checkpoint_steps()[:-keep]:
            if old != best:
                _discard(self.checkpoint(old))

    def best_step(self, accuracy: Mapping[int, float]) -> int | None:
        """The step of the checkpoint of highest accuracy, the earliest of several; None if none has one."""
        measured = [step for step in self.checkpoint_steps() if step in accuracy]
        return max(measured, key=lambda step: accuracy[step], default=None)

    def newest_whole(self) -> tuple[Path | None, dict[int, str]]:
        """The newest checkpoint that is what the run wrote, if any, and what is wrong with newer ones, by step."""
        damaged: dict[int, str] = {}
        for step in reversed(self.checkpoint_steps()):
            wrong = self.wrong_with(step)
            if not wrong:
                return self.checkpoint(step), damaged
            damaged[step] = wrong
        if damaged:
            reasons = "; ".join(f"step_{step}: {wrong}" for step, wrong in damaged.items())
            raise InputError(f"every checkpoint in {self.checkpoints} is damaged ({reasons}); start a new run.")
        return None, damaged

    def wrong_with(self, step: int, copy: Path | None = None) -> str:
        """What is wrong with a checkpoint, in words: it is damaged, or is not what this run wrote after this step.

        A `copy` is looked at in its place, which need not hold the tensors of the trainer's state.
        """
        from oblrpo.runs.state_files import STATE, TENSORS, origin

        place = copy or self.checkpoint(step)
        if wrong := damage(place, (STATE, TENSORS, "*model*.safetensors"), spared=TENSORS if copy else ""):
            return wrong
        run, reached = origin(place)
        if run != self.identity().run:
            return "another run wrote it"
        return "" if reached == step else f"it is of step {reached}"

    def damaged_best(self, accuracy: Mapping[int, float]) -> dict[int, str]:
        """The step of the checkpoint of highest accuracy, with what is wrong with it; empty if nothing is."""
        best = self.best_step(accuracy)
        wrong = "" if best is None else self.wrong_with(best)
        return {best: wrong} if best is not None and wrong else {}

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is neither resumed from nor counted among those that are kept."""
        aside = self.checkpoints / f"damaged_step_{step}"
        _replace(self.checkpoint(step), aside)
        return aside

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / f"step_{step}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints that are kept, in order."""
        steps = (entry.name.removeprefix("step_") for entry in self.checkpoints.glob("step_*") if entry.is_dir())
        return sorted(int(step) for step in steps if re.fullmatch("0|[1-9][0-9]{0,17}", step))

    def reached(self, step: int | None = None) -> int:
        """The step of a checkpoint that is there; the newest for None."""
        steps = self.checkpoint_steps() or self.checkpoint_steps()  # the only one may be replaced while it is listed
        if not steps:
            raise InputError(f"{self.path} holds no checkpoint; train with --save-steps.")
        if step not in {None, *steps}:
            raise InputError(f"{self.path} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}.")
        return steps[-1] if step is None else step

    def clean_up(self) -> None:
        """Remove what an interrupted write left, and see that the run has its folders."""
        for folder in (self.completions, self.checkpoints):
            folder.mkdir(exist_ok=True)
            for partial in folder.glob(".*step_*.partial"):
                _remove(partial)


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove a folder or a file, if it is there, of which a reader sees all until then, and nothing afterwards."""
    if os.path.lexists(path):
        os.replace(path, aside := path.with_name(f".{path.name}.old.partial"))
        _remove(aside)


def _replace(partial: Path, target: Path) -> None:
    """Put a folder that is written in the place of another, on the disk for good."""
    sync_folder(partial)
    _discard(target)
    os.replace(partial, target)
    sync(target.parent)


def from_here(path: Path) -> Path:
    """A path as one writes it in the current folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def how_to_resume(config: TrainConfig) -> str:
    """How a run is resumed, as the end of a sentence."""
    command = f"oblrpo train --resume --output {shlex.quote(config.run.output)}"
    return f"continue with: {command} (from Python resume=True)"


def checkpoint_of(model: str) -> str:
    """Return the newest checkpoint where a model is given by the folder of its run, or else the name as it is."""
    folder = RunFolder(Path(model))
    is_run = model and folder.config_file.is_file() and folder.checkpoints.is_dir()
    return str(folder.checkpoint(folder.reached())) if is_run else model


def run_of(model: str) -> TrainConfig | None:
    """Return the settings of the run that a checkpoint or its export is part of; None if it is part of none."""
    path = Path(model)
    folder = RunFolder(path.parent.parent if path.parent.name == "checkpoints" else path.parent)
    inside = path.parent == folder.checkpoints or path == folder.path / "export"
    return folder.saved_config() if inside and folder.config_file.is_file() else None

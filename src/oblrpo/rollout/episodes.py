"""Episodes: a policy takes turns with tools, side by side, and reads their results as token ids behind its own.

What a policy has drawn is never tokenised again: a turn's tokens stay as they are, and the tokens of results follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oblrpo.environments import Environments, Host
from oblrpo.errors import InputError
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.sequences import pad
from oblrpo.policy.tool_calls import ToolFormat
from oblrpo.rollout.rollouts import Rollouts, Turn, TurnSampler, join
from oblrpo.scores import Features
from oblrpo.settings import TurnsConfig
from oblrpo.tasks import Problem
from oblrpo.tasks.episode import Episode
from oblrpo.tasks.rows import native
from oblrpo.tasks.task import Messages
from oblrpo.workers import WorkerDied, in_thread

TOGETHER = 2.0
"""Seconds that others wait for a row's tools. What takes longer joins a later turn, and holds up nobody any more."""


@dataclass
class _Row:
    """An episode that is going on."""

    host: Host
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)  # 1 for the policy's tokens
    figures: list[Tensor] = field(default_factory=list)  # (kinds, tokens) of every turn and every result
    seconds: float = 0.0  # spent in tools
    episode: Episode = field(default_factory=Episode)
    broken: str = ""  # what became of its environment
    failed: str = ""  # the first call that failed


@dataclass
class EpisodeSampler:
    """Lets a policy act in environments: draws turns with another sampler, and runs the tools that they call.

    All rows of a block draw their turns together; tools run side by side. A row whose tools take longer than
    `TOGETHER` joins a later turn. A tool that takes longer than `tool_seconds` is interrupted, and the policy reads
    that it was; where that is impossible, and where a process ends, the episode ends with `error`.
    """

    sampler: TurnSampler
    policy: Policy
    environments: Environments
    format: ToolFormat
    limits: TurnsConfig
    told: set[str] = field(default_factory=set)
    """What was said once: that most calls fail, or that environments end before their episodes."""
    takes_problems = True

    def sync(self, policy: Policy) -> None:
        """Sample from these weights from now on."""
        self.policy = policy
        self.sampler.sync(policy)

    def sample(
        self, problems: Sequence[Problem], num_generations: int, max_completion_length: int, temperature: float
    ) -> Rollouts:
        """Return G episodes of every problem, of at most so many tokens each, those of tools counted.

        Raises:
            InputError: an environment cannot be reset, or all of them ended before their episodes did.
        """
        G, most = num_generations, getattr(self.sampler, "max_num_seqs", 0)
        size = max(1, most // G) if most else len(problems)
        rows = [_Row(host) for host in self.environments.take(len(problems) * G)]
        try:
            blocks = [
                self._block(problems[at:end], rows[at * G : end * G], max_completion_length, temperature)
                for at, end in ((at, at + size) for at in range(0, len(problems), size))
            ]
        except BaseException:  # tools may be at work
            self.environments.close()
            raise
        for row in rows:
            if row.broken:
                self.environments.end(row.host)
        self.environments.put_back([row.host for row in rows if not row.broken])
        self._tell(rows)
        if all(row.broken for row in rows):
            raise InputError(f"no environment lived to the end of its episode; the first: {rows[0].broken}.")
        return join(blocks)

    def _tell(self, rows: list[_Row]) -> None:
        calls, failures = sum(row.episode.calls for row in rows), sum(row.episode.failures for row in rows)
        ended, failed = [row.broken for row in rows if row.broken], [row.failed for row in rows if row.failed]
        notes = {}
        if ended:
            notes["ended"] = f"the environments of {len(ended)} of {len(rows)} episodes ended early; these are left out"
        if failed and 2 * failures > calls:
            notes["failed"] = f"{failures} of {calls} calls of tools failed"
        for kind, note in notes.items():
            if kind not in self.told:
                self.told.add(kind)
                self.environments.warn(f"{note}. The first: {(ended if kind == 'ended' else failed)[0]}.")

    def _block(self, problems: Sequence[Problem], rows: list[_Row], longest: int, temperature: float) -> Rollouts:
        G = len(rows) // len(problems)
        self._reset(problems, rows, longest)
        turns = self.sampler.turns(temperature)
        busy: dict[Future[Any], tuple[int, float]] = {}  # the tools at work: of which row, and since when
        ready = list(range(len(rows)))
        while ready:
            contexts = [rows[index].prompt + rows[index].ids for index in ready]
            rooms = [longest - len(rows[index].ids) for index in ready]
            for index, context, turn in zip(ready, contexts, turns.draw(ready, contexts, rooms), strict=True):
                if calls := self._took(rows[index], context, turn):
                    busy[in_thread(self._run, rows[index], calls)] = index, time.monotonic()
                else:
                    turns.end(index)
            ready = []
            while busy and not ready:
                for done in sorted(_finished(busy), key=busy.__getitem__):
                    index, _ = busy.pop(done)
                    if self._read(rows[index], done.result(), longest):
                        ready.append(index)
                    else:
                        turns.end(index)
        if self.environments.reward:
            for asked in [in_thread(self._reward, row) for row in rows]:
                asked.result()
        return self._rollouts(rows, G)

    def _reset(self, problems: Sequence[Problem], rows: list[_Row], longest: int) -> None:
        """Begin all episodes; what an environment says first stands behind the last message of its prompt."""
        G = len(rows) // len(problems)
        seeds = torch.randint(2**48, (len(problems),), device="cpu").tolist()
        of_process = rows[0].host.environment is None
        calls = []
        for index, row in enumerate(rows):
            problem = problems[index // G]
            if own := getattr(problem.prompt, "template_args", {}):
                where = getattr(problem.prompt, "where", "") or "a row"
                raise InputError(
                    f"{where} brings {', '.join(own)} for the chat template, but a run with tools shows its own, by "
                    "chat_template_args alone: leave out the columns tools and chat_template_kwargs."
                )
            columns = {**({"answer": problem.answer} if problem.answer else {}), **problem.columns}
            columns["prompt"] = problem.prompt
            message = {"row": _as_json(columns, problem) if of_process else columns, "output": index % G}
            calls.append(in_thread(self._ask, row, message | {"seed": seeds[index // G]}, self.limits.episode_seconds))
        prompts: list[Prompt] = []
        for index, call in enumerate(calls):
            problem, reply = problems[index // G], call.result()
            if failed := rows[index].broken or reply.get("failed"):
                given = ", ".join({"prompt": 0, "answer": 0} | dict(problem.columns))
                raise InputError(
                    f"reset of {self.environments.name or 'the tools'} failed for the prompt {problem.text[:40]!r}: "
                    f"{failed}; it is given {given}."
                )
            prompts.append(_with_observation(problem.prompt, reply["text"]))
            rows[index].episode.observation = reply["text"]
            rows[index].episode.environment = rows[index].host.environment
        for row, ids in zip(rows, self.policy.tokens(prompts), strict=True):
            row.prompt = ids
            if len(ids) + longest > self.policy.longest:
                raise InputError(
                    f"with what reset says ({row.episode.observation[:40]!r}) a prompt has {len(ids)} tokens, and "
                    f"{longest} more (max_completion_length) are too many for the {self.policy.longest} that the model "
                    "reads: let reset say less, or lower max_completion_length."
                )

    def _took(self, row: _Row, context: list[int], turn: Turn) -> list[Any]:
        """Take the turn of a row, and return the calls that it makes; none where the episode ends with it."""
        row.ids += turn.ids
        row.own += [1] * len(turn.ids)
        row.figures.append(turn.figures_KC)
        episode = row.episode
        episode.turns += 1
        message = self.format.parse(context, turn.ids)
        episode.append(message)
        calls: list[Any] = message.get("tool_calls") or []
        if turn.ids[-1] not in self.policy.end_tokens:
            episode.stop = "length"
        elif not calls:
            episode.stop = "answer"
        elif episode.turns == self.limits.max_turns:
            episode.stop = "turns"
        return [] if episode.stop else calls

    def _run(self, row: _Row, calls: list[Any]) -> list[tuple[str, str, bool]]:
        """Return name, result and failure of each call, up to one that the episode does not survive."""
        results = []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            reply = self._ask(row, {"call": name, "arguments": arguments}, self.limits.tool_seconds)
            if row.broken:
                break
            results.append((name, reply.get("text", ""), bool(reply.get("failed"))))
            row.failed = row.failed or (f"the tool '{name}': {reply['failed']}" if "failed" in reply else "")
            if reply.get("images"):
                raise InputError(f"the tool '{name}' returned an image; oblrpo trains on text alone.")
            if row.seconds > self.limits.episode_seconds:
                break
        return results

    def _ask(self, row: _Row, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Ask the environment of a row; {} where it has ended."""
        begun = time.monotonic()
        try:
            return row.host.ask(message, seconds)
        except (TimeoutError, WorkerDied) as error:
            what = "get_reward" if "value" in message else "reset"
            if "call" in message:
                what = f"the tool '{message['call']}'"
            row.broken = f"{what}: {error}"
            return {}
        finally:
            row.seconds += time.monotonic() - begun if "call" in message else 0.0

    def _read(self, row: _Row, results: list[tuple[str, str, bool]], longest: int) -> bool:
        """Put the results behind the tokens of a row, and return whether it goes on."""
        episode, message = row.episode, row.episode[-1]
        episode.calls += len(results) + bool(row.broken)
        episode.failures += sum(failed for *_, failed in results) + bool(row.broken)
        if row.broken or row.seconds > self.limits.episode_seconds:
            episode.stop, episode.error = ("error", row.broken) if row.broken else ("timeout", "")
            return False
        ids = self.format.results(message, [(name, text) for name, text, _ in results], row.ids)
        if len(row.ids) + len(ids) >= longest:  # nothing could be said to them
            episode.stop = "length"
            return False
        episode += [{"role": "tool", "name": name, "content": text} for name, text, _ in results]
        row.ids += ids
        row.own += [0] * len(ids)
        row.figures.append(row.figures[-1].new_zeros(len(row.figures[-1]), len(ids)))
        return True

    def _reward(self, row: _Row) -> None:
        if not row.broken:
            reply = self._ask(row, {"value": True}, self.limits.episode_seconds)
            row.episode.reward = reply.get("value") if "failed" not in reply else [f"an error, {reply['failed']}"]
        if row.broken:
            row.episode.stop, row.episode.error = "error", row.broken

    def _rollouts(self, rows: list[_Row], G: int) -> Rollouts:
        device, padding = self.policy.device, self.policy.pad_token
        prompt_SQ, prompt_mask_SQ = self.policy.pad_prompts([row.prompt for row in rows])
        completion_SC, mask_SC = pad([row.ids for row in rows], padding, left=False, device=device)
        own_SC, _ = pad([row.own for row in rows], 0, left=False, device=device)
        sequences = Sequences(
            torch.cat([prompt_SQ, completion_SC], 1),
            torch.cat([prompt_mask_SQ, mask_SC], 1),
            torch.cat([torch.zeros_like(prompt_SQ), own_SC], 1),
            prompt_SQ.shape[1],
        )
        figures_SKC = torch.stack(
            [torch.nn.functional.pad(torch.cat(row.figures, 1), (0, own_SC.shape[1] - len(row.ids))) for row in rows]
        ).to(device)
        logps_SC, *further = figures_SKC.unbind(1)
        features = Features.from_tokens(further[1], logps_SC, further[0], own_SC) if further else None
        episodes = [row.episode for row in rows]
        for row in rows:
            row.episode.text = self.policy.tokenizer.decode(row.ids, skip_special_tokens=True)
        clipped_S = torch.tensor([episode.stop == "length" for episode in episodes], device=device)
        texts = [episode.text for episode in episodes]
        features = features or Features.of_logps(logps_SC, own_SC)
        return Rollouts(
            sequences, texts, clipped_S, logps_SC if getattr(self.sampler, "logps", True) else None, features, episodes
        )


def _finished(busy: Mapping[Future[Any], tuple[int, float]]) -> list[Future[Any]]:
    """Wait for calls, `TOGETHER` for each since it began, or else for the first; return those that are done."""
    now = time.monotonic()
    young = {call: begun for call, (_, begun) in busy.items() if begun + TOGETHER > now}
    if young:
        wait(young, max(young.values()) + TOGETHER - now)
    return [call for call in busy if call.done()] or [*wait(busy, return_when=FIRST_COMPLETED).done]


def _with_observation(prompt: Prompt, text: str) -> Prompt:
    """Return a prompt with what the environment says behind its last message, as in TRL."""
    if not text or isinstance(prompt, str):
        return prompt + text if isinstance(prompt, str) else prompt
    last: dict[str, Any] = dict(prompt[-1])
    if not isinstance(last.get("content"), str):
        raise InputError("what reset returns cannot stand behind a message whose content is no text.")
    messages = [*map(dict, prompt[:-1]), last | {"content": last["content"] + text}]
    return Messages(messages, getattr(prompt, "where", ""), getattr(prompt, "template_args", {}))


def _as_json(columns: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """Return the columns of a row as its environment's process is given them."""
    row = {name: native(value) for name, value in columns.items()}
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise InputError(
                f"column '{name}' ({type(value).__name__}) of the prompt {problem.text[:40]!r} cannot be handed to the "
                "environment's process; make it text or numbers, or give the environment from Python as a class."
            ) from None
    return row


def turn_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of turns and calls; those of tools by TRL's names."""
    calls, failures = sum(each.calls for each in episodes), sum(each.failures for each in episodes)
    return {
        "turns/mean": sum(each.turns for each in episodes) / len(episodes),
        "tools/call_frequency": calls / len(episodes),
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }

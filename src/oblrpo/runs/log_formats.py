"""How logs are written: JSON Lines, tables, and what trainers print; as entries, mappings of names to values."""

import csv
import html
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from oblrpo.errors import InputError
from oblrpo.runs.log_rows import NONE, OURS, is_metric, named, number

CONSOLE = re.compile(r"(?:^|[\s:|│])(step:\d+(?: - \S.*| -)?)[│| ]*$")
"""A step of verl's console logger: `step:7 - actor/entropy:0.31 - critic/score/mean:0.5`."""
PIECE = re.compile(
    r"[^\s:]+:(?:[\w.]+\(\[*)?([-+]?(?:\d[\d_]*\.?\d*(?:e[-+]?\d+)?|nan|inf)|True|False|None)(?:\]*\))?", re.IGNORECASE
)
"""A metric in it."""

QUOTED = re.compile(r"""(['"])([^'"]{1,200})\1\s*:\s*['"]?(?:[\w.]+\(\[*)?([-+\w./%]+)(?![-+\w./%]|\s*,\s*[-+.\d])""")
"""A name and its value in a printed dict: `'loss': 0.1`, `"loss": "0.1"`, `'loss': tensor(0.1, device='cpu')`."""
PAIR = re.compile(
    r"""['"]?(\s*[:=|]\s*|\s)['"]?(?:[\w.]+\(\[?)?"""
    r"([-+]?(?:(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?!\w|[.,]\d)(?:\s?%)?)",
    re.IGNORECASE,
)
"""A number and what is between it and its name before: `loss: 0.1`, `loss=0.1`, `| loss | 0.1 |`."""
BAR = re.compile(r"^\s*(?:Train\w*(?: Progress)?:\s*)?\d+%\|[^|]*\|\s*(\d+)/\d+ \[")
"""A progress bar of steps."""
COUNT = re.compile(r"([a-z]+)[\s:#=\[]*(\d+)\b", re.IGNORECASE)
"""A step before a printed dict: `step 7: {...}`."""
BEFORE = re.compile(r"[,|;{}()\[\]\"'•]|\s-\s|: |= ")  # what ends before a name begins
OTHER = re.compile(r"\b(max|val\w*|eval\w*|test|best|total|critic|of|per|no|last)\b")
"""Words before a step that make it another's."""
PLAIN = re.compile(r"(?:[A-Z]{4,}|[^A-Za-z]|\b(?i:train\w*|batch|rollout|episode|current))$")
"""What before the name of a metric does not make it another's, such as the level of a log."""
EVALUATION = re.compile(r"\b(?:val(?:id(?:ation)?)?|eval(?:uation)?|test(?:ing)?|held.?out)\b(?![./])", re.IGNORECASE)
"""Words before metrics that make them those of an evaluation."""
SAMPLE = re.compile(
    r"(?<![/\w])(?<!per )(?:gen(?:eration)?|sample|completion|response|prompt|question)(?:_?idx?\W|[ #(\[])+\d+\b",
    re.IGNORECASE,
)
SAMPLED = {"prompt", "question", "completion", "response", "answer", "ground_truth", "messages", "idx"}
"""What a line says of one completion: its number, or a key of JSON and dicts."""
UPDATE = {"loss", "grad_norm", "kl", "entropy", "learning_rate"}
"""Metrics that a line about one completion does not have."""
EPOCH = re.compile(r"\bEpoch:? ?\[(\d+)/\d+\] ?\((\d+)/(\d+)\)")
"""MiniMind's steps, which begin again with each epoch."""
PROSE = re.compile(r"(?:\b[a-z']+,? ){5}")  # words that no trainer prints beside its metrics
STARTS = re.compile(rf"{BAR.pattern}|{{|[^\s'\"}}][^}}]*{{|.*\bstep:\d+ - ")
"""A line that continues no printed dict that is open."""

DELIMITERS = {"\t": "a table with tabs", "|": "a table with bars", ";": "CSV by semicolons", ",": "CSV", "": "a table"}
LONGEST_LINE, MOST_LINES = 1 << 22, 300  # characters of a line, and lines that a row in several may have
VERL, PAIRS = "what verl prints", "pairs in a text"
UNREAD, SINGLE = "lines not read", "lines about single completions"
SURENESS = {VERL: 2, PAIRS: 0}  # how surely something is a log's, by kind; 1 is any other
Entries = tuple[str, list[dict[str, Any]]]  # a kind, and what was read


class Text:
    """The lines of a log; `entries` yields what they hold, and the rest is known afterwards."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self.name = name
        self.kinds: dict[str, int] = {}
        """What was found, and how surely it is a log's."""
        self.notes = Counter[str]()
        """What was not read: by what it is, how many lines or metrics."""
        self._lines, self._again = iter(lines), deque[str]()
        self._head: tuple[str, ...] = ()
        self._delimiter = ","
        self._step, self._said = "", set[str]()  # in a line before, and the metrics since
        self._bar = ""  # of a progress bar or a line right before, for a dict without one

    def entries(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """What lines hold, and how surely it is a log's."""
        readers = (self._console, self._row, self._html, self._printed, self._header, self._pairs)
        while (line := self._next()) is not None:
            if line[0] == "{" and isinstance(entry := as_json(line), dict):
                if not SAMPLED.isdisjoint(entry) and UPDATE.isdisjoint(named(name)[0] for name in entry):
                    self.notes[SINGLE] += 1
                    continue
                self.kinds["JSON Lines"] = 1
                yield 1, entry
                continue
            if not line.endswith("{") and not any(map(str.isalnum, line)):
                continue
            if bar := BAR.match(line):
                self._bar = bar[1]
            kind, entries = next((found for read in readers if (found := read(line))), (None, []))
            if kind:
                self.kinds[kind] = SURENESS.get(kind, 1)
            self.notes[UNREAD] += kind is None and not bar
            self._bar = "" if entries else self._bar
            yield from ((self.kinds[kind or ""], entry) for entry in entries)

    def _raw(self) -> str | None:
        return self._again.popleft() if self._again else next(self._lines, None)

    def _next(self) -> str | None:
        while (line := self._raw()) is not None:
            line = re.sub(r"\x1b\[[0-9;]*[mK]", "", line) if "\x1b" in line else line
            line = line.replace("\ufeff", "").rstrip("\r\n \0")
            if line := line.lstrip("> ") if line[:1] == ">" else line:  # of an answer that quotes
                return line
        return None

    def _console(self, line: str) -> Entries | None:
        if "step:" not in line or not (match := CONSOLE.search(line)):
            return None
        before, lengths, text = line[: match.start(1)], [len(line)], match[1].rstrip("│| ")
        kind = re.sub(r"(\\ )+", r"\\s*", re.sub(r"\d+", r"\\d+", re.escape(before)))
        while (more := self._next()) is not None:
            if before.strip().isdecimal():  # the number of the line
                kind = rf"\s*{int(before) + len(lengths)}\s+"
            part = "" if CONSOLE.search(more) else re.sub(rf"^(?:{kind})?\s*", "", more, count=1).strip("│| ")
            if not (joined := _continued(text, part, len(lengths) > 1 and lengths[-1] >= max(lengths) - 1)):
                self._again.appendleft(more)
                break
            text = joined
            lengths.append(len(more))
        pieces = [piece.strip().rpartition(":") for piece in text.removesuffix(" -").split(" - ")]
        found = {name: PIECE.fullmatch(f"x:{value}") for name, _, value in pieces}
        self.notes["metrics without a value"] += list(found.values()).count(None)
        return (VERL, [{name: value[1] for name, value in found.items() if value}]) if len(pieces) > 1 else None

    def _row(self, line: str) -> Entries | None:
        if not self._head:
            return None
        taken: list[str] = []

        def more() -> Iterator[str]:  # of a row with a field of several lines, or a quote that opens nothing
            for each in islice(iter(self._raw, None), MOST_LINES):
                taken.append(each)
                yield each

        cells = _cells(line, self._delimiter, more())
        if self._delimiter == "" and len(cells) == len(self._head) + 1:  # the index of a frame of pandas
            cells = cells[1:]
        if self._delimiter != "," and "," in line:
            cells = [re.sub(r"^([-+]?\d+),(\d+(?:[eE][-+]?\d+)?)$", r"\1.\2", cell) for cell in cells]  # decimal commas
        if len(cells) != len(self._head) or not any(number(cell) != NONE for cell in cells):
            self._again.extendleft(reversed(taken))
            return None
        return DELIMITERS[self._delimiter], [dict(zip(self._head, cells, strict=True))]

    def _header(self, line: str) -> Entries | None:
        for delimiter in DELIMITERS:
            cells = _cells(line, delimiter) if delimiter in line else []
            if [cell.lower() for cell in cells] == ["wall time", "step", "value"]:
                cells[2] = self._of_tensorboard()
            if any(cell[-1:].isdigit() and number(re.split("[:=]", cell)[-1]) != NONE for cell in cells):
                continue
            known = [cell for cell in cells if named(cell)[0]]
            if len(known) < (1 if delimiter else 2 + len(cells) // 4):
                continue
            if delimiter == "|" and not any(named(cell)[0] == "step" or cell.lower() == "epoch" for cell in cells):
                continue  # a comparison in a text
            runs = {run: None for run in (cell.rpartition(" - ")[0] for cell in known) if run}
            if len(runs) > 1:
                raise InputError(
                    f"{self.name} holds the charts of {len(runs)} runs ({', '.join(runs)[:200]}); keep the columns of "
                    "one of them, or export the history of one run."
                )
            self._head, self._delimiter = tuple(cells), delimiter
            return "".join(f"a chart of the run {run}" for run in runs), []
        return None

    def _of_tensorboard(self) -> str:
        """The metric that TensorBoard's CSV holds: its name stands in the name of the file."""
        tag = re.sub(r".*(?:^|-)tag-|\.\w+$", "", self.name.rpartition("/")[2]).removeprefix("train_")
        if known := next((name for name in OURS if name.replace("/", "_") == tag), ""):
            return known
        if part := re.fullmatch(r"rewards_(.+?)(?:_(mean|std))?", tag):
            return f"rewards/{part[1]}/{part[2] or 'mean'}"
        raise InputError(
            f"{self.name} holds one metric of TensorBoard, whose name is only in the file's name: name the file as "
            "TensorBoard does, such as run-grpo-tag-train_reward.csv."
        )

    def _html(self, line: str) -> Entries | None:
        """Rows of HTML become lines with tabs."""
        if "<tr" not in line:
            return None
        for _ in range(MOST_LINES):
            if "</tr" in line or (more := self._next()) is None:
                break
            line += more
        for row in reversed(re.findall(r"<tr\b.*?</tr|<tr\b.*", line, re.DOTALL)):
            cells = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]", row, re.DOTALL)
            texts = (html.unescape(re.sub(r"<[^>]*>|\s+", " ", cell)).strip() for cell in cells)
            self._again.appendleft("\t".join(texts))
        return "", []

    def _printed(self, line: str) -> Entries | None:
        if not QUOTED.search(line) and not line.endswith("{"):
            return None
        start = max(line.find("{"), 0)
        before, text = line[:start], line[start:]
        while text.count("{") > text.count("}") and (more := self._next()):
            if STARTS.match(more) or text.count("\n") == MOST_LINES:
                self._again.appendleft(more)
                break
            text += f"\n{more}"
        found: list[dict[str, Any]] = []
        samples = self.notes[SINGLE]
        steps = [step for word, step in COUNT.findall(before) if named(word)[0] == "step"]
        for group in _groups(text.replace("\n", "")):  # a paste may have wrapped it within a word
            entry = {name: value for _, name, value in QUOTED.findall(group) if number(value) != NONE}
            if not any(map(is_metric, entry)):
                continue
            of_sample = not SAMPLED.isdisjoint(re.findall(r"""['"](\w+)['"]\s*:""", group))
            if of_sample and UPDATE.isdisjoint(named(name)[0] for name in entry):
                self.notes[SINGLE] += 1
                continue
            if EVALUATION.search(before):
                entry = {_heldout(name): value for name, value in entry.items()}
            if steps:
                entry.setdefault("step", steps[-1])
            elif not next(iter(entry)).startswith("eval_") and (bar := BAR.match(before) or self._bar):
                entry["bar"] = bar if isinstance(bar, str) else bar[1]
            found.append(entry)
        return ("printed dicts", found) if found else ("", []) if self.notes[SINGLE] > samples else None

    def _pairs(self, line: str) -> Entries | None:
        line = " ".join(re.sub("[│┃║]", "|", line).split())
        line = EPOCH.sub(lambda found: f"step: {(int(found[1]) - 1) * int(found[3]) + int(found[2])}", line)
        if PROSE.search(line):
            return None
        entries, end, heldout, found = [dict[str, Any]()], 0, None, list(PAIR.finditer(line))
        for match in found:
            name = _name(line[end : match.start()])
            our = named(name)[0] if match[2][-1] != "%" or named(name)[0] != "step" else ""  # of a bar
            follows = line[match.end() : match.end() + 2].strip()[:1]
            if our and (not match[1].isspace() or len(found) > 2 or our == "step" or not follows.isalnum()):
                if our == "step" and name in entries[-1]:  # line ends that are missing
                    entries.append({})
                elif our != "step" and heldout is None:
                    heldout = EVALUATION.search(line[: match.start()]) is not None
                entries[-1].setdefault(_heldout(name) if heldout else name, match[2])
            end = match.end()
        rows = [entry for entry in entries if any(map(is_metric, entry))]
        steps = [value for entry in entries for name, value in entry.items() if named(name)[0] == "step"]
        if not rows and steps and "wandb:" in line:  # of a summary, which is sorted by name
            return PAIRS, [{"step": steps[-1]}]
        names = {named(name)[0] for row in rows for name in row if is_metric(name)}
        again = bool(self._step) and not steps and not self._said.isdisjoint(names)
        if rows and (SAMPLE.search(line) or again) and UPDATE.isdisjoint(names):
            self.notes[SINGLE] += 1  # within a step a metric comes once, or again for each of its completions
            return "", []
        self._step = "" if again else self._step  # of something else, such as a checkpoint that was loaded
        if self._step and rows and not steps:
            rows[0]["step"] = self._step
        if steps:
            self._step, self._said = steps[-1], set()
        self._said |= names
        if rows:
            return PAIRS, rows
        self._bar = steps[-1] if steps else self._bar
        return None


def _continued(text: str, part: str, full: bool) -> str:
    """A step of verl's with what a line adds, wherever a paste has wrapped it; empty where it is another line."""
    between = " " if text.endswith(" -") or f"{part} ".startswith("- ") else ""
    *whole, last = f"{text}{between}{part}".removesuffix(" -").split(" - ")
    number = not between and len(whole) == text.count(" - ") and PIECE.fullmatch(text.rpartition(" - ")[2])
    fits = full and PIECE.fullmatch(last) if number else not re.search(r"\s", last)  # the end of one, or another line
    return f"{text}{between}{part}" if part and fits and all(map(PIECE.fullmatch, whole)) else ""


def _cells(line: str, delimiter: str, more: Iterable[str] = ()) -> list[str]:
    """The cells of a row; none where quotes are not closed."""
    if delimiter in ("", "|"):
        line = line.strip()
        line = line[1:].removesuffix("|") if line[:1] == "|" else line
        cells = [each.strip(" *`") for each in (line.split("|") if delimiter else re.split(r"\s{2,}|\t", line))]
        cells = cells if delimiter or len(cells) > 2 else line.split()
    elif '"' in line:
        limit = csv.field_size_limit(LONGEST_LINE * MOST_LINES)
        try:
            cells = [
                cell.strip() for cell in next(csv.reader(chain([f"{line}\n"], more), delimiter=delimiter, strict=True))
            ]
        except csv.Error:
            cells = []
        finally:
            csv.field_size_limit(limit)
    else:
        cells = [cell.strip() for cell in line.split(delimiter)]
    return cells


def _groups(text: str) -> Iterator[str]:
    """What stands in the outermost braces of a text; all of it where there are none."""
    depth, start = 0, 0
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            start = match.end() if depth == 0 else start
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                yield text[start : match.start()]
    if depth or "{" not in text:
        yield re.sub(r"[^,\s]*$", "", text[start:]) if depth else text  # the last may be cut


def _name(text: str) -> str:
    """The name of a metric at the end of a text, without what stands before it in a log."""
    name = BEFORE.split(text)[-1].strip(" -*#.>:•")
    before, _, word = name.rpartition(" ")
    step = named(word)[0] == "step" and not OTHER.search(before.lower())
    return word if before and not named(name)[0] and (step or PLAIN.search(before)) else name


def _heldout(name: str) -> str:
    return name if named(name)[0] in ("step", "eval/accuracy") else f"eval_{name}"


def as_json(text: str) -> Any:
    """What a text says in JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

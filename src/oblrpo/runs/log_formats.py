"""How logs are written: JSON Lines, tables, and what trainers print; as entries, mappings of names to values."""

from __future__ import annotations

import csv
import html
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from oblrpo.errors import InputError
from oblrpo.runs.log_rows import NONE, OURS, UNSAID, named, number

CONSOLE = re.compile(r"(?:^|\s)(step:\d+ - \S.*)$")
"""A step of verl's console logger: `step:7 - actor/entropy:0.31 - critic/score/mean:0.5`."""
WRAPPED = re.compile(r"^\s*- |\s- [\w/@.+-]+:|^[\w/@.+-]*:[-+\d.einaf]+\s*$|^[\d.]+\s*$")
"""A line that goes on with it, where a paste has wrapped it."""

NUMBER = r"[-+]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?![\w]|\.\d)"
QUOTED = re.compile(r"""(['"])([^'"]{1,200})\1\s*:\s*['"]?(?:[\w.]+\(\[*)?([-+\w./]+)(?![-+\w./]|\s*,\s*[-+.\d])""")
"""A name and its value in a printed dict: `'loss': 0.1`, `"loss": "0.1"`, `'loss': tensor(0.1, device='cpu')`."""
PAIR = re.compile(rf"""['"]?(\s*[:=|]\s*|\s)['"]?(?:[\w.]+\(\[?)?({NUMBER})""", re.IGNORECASE)
"""What is between a name and its value, which the name stands before: `loss: 0.1`, `loss=0.1`, `| loss | 0.1 |`."""
BAR = re.compile(r"^\s*(?:Train\w*(?: Progress)?:\s*)?\d+%\|[^|]*\|\s*(\d+)/\d+ \[")
"""A progress bar of steps."""
COUNT = re.compile(r"([a-z]+)[\s:#=\[]*(\d+)\b", re.IGNORECASE)
"""A step before a printed dict: `step 7: {...}`."""
BEFORE = re.compile(r"[,|;{}()\[\]\"'•]|\s-\s|: |= ")
"""What ends before a name begins."""
OTHER = re.compile(r"\b(std|min|max|val\w*|eval\w*|test|best|worst|old|ref\w*|target|total|critic|of|per|no|last)\b")
"""Words before the name of a metric that make it another's."""

DELIMITERS = {"\t": "a table with tabs", "|": "a table with bars", ";": "CSV by semicolons", ",": "CSV", "": "a table"}
LONG, MANY = 1 << 22, 300
"""Characters of a line, and lines that a row in several may have."""
Found = tuple[int, list[Mapping[str, Any]]]


class Text:
    """The lines of a log; `entries` yields what they hold, and the rest is known afterwards."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self.name = name
        self.kinds: tuple[dict[str, None], ...] = ({}, {}, {})
        """What was found, by how surely it is a log's."""
        self.unread = 0
        """How many lines held nothing."""
        self._lines, self._again = iter(lines), deque[str]()
        self._head: tuple[str, ...] = ()
        self._delimiter = ","
        self._step: float | None = None  # in a line before
        self._bar = ""

    def entries(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """What lines hold, and how surely it is a log's: 2 what verl prints, 1 a format, 0 pairs in a text."""
        while (line := self._next()) is not None:
            if line[0] == "{" and isinstance(entry := as_json(line), dict):
                yield self._told(1, "JSON Lines", [entry])[0], entry
                continue
            line = re.sub(r"\x1b\[[0-9;]*m", "", line) if "\x1b" in line else line
            if not any(map(str.isalnum, line)):
                continue
            if bar := BAR.match(line):
                self._bar = bar[1]
            found = self._console(line) or self._row(line) or self._html(line)
            found = found or self._printed(line) or self._header(line) or self._pairs(line)
            if found is None:
                self.unread += not bar
                continue
            self._bar = "" if found[1] else self._bar
            yield from ((found[0], entry) for entry in found[1])

    def _next(self) -> str | None:
        while (line := self._again.popleft() if self._again else next(self._lines, None)) is not None:
            line = line.replace("\ufeff", "").rstrip("\r\n \0")
            if line := line.lstrip("> ") if line[:1] == ">" else line:  # of an answer that quotes
                return line
        return None

    def _told(self, sure: int, kind: str, entries: list[Mapping[str, Any]]) -> Found:
        self.kinds[sure][kind] = None
        return sure, entries

    def _console(self, line: str) -> Found | None:
        if "step:" not in line or not (match := CONSOLE.search(line)):
            return None
        text = match[1]
        while (more := self._next()) is not None:
            if CONSOLE.search(more) or not WRAPPED.search(more):
                self._again.appendleft(more)
                break
            text += f" {more}" if text[-2:] == " -" or more[:2] == "- " else more
        pairs = (part.rpartition(":") for part in text.split(" - "))
        entry = {name.strip(): re.sub(r"^[\w.]+\((.*)\)$", r"\1", value.strip()) for name, _, value in pairs}
        return self._told(2, "what verl prints", [entry])

    def _row(self, line: str) -> Found | None:
        if not self._head:
            return None
        cells, joined = self._cells(line, self._delimiter), list[str]()
        if '"' in line and line.count('"') % 2:  # a field of several lines, or a quote that opens nothing
            while len(joined) < MANY and (more := next(self._lines, None) if not self._again else None) is not None:
                joined.append(more)
                if more.count('"') % 2:
                    cells = self._cells(line + "".join(joined), self._delimiter)
                    break
            if len(cells) != len(self._head):
                self._again.extendleft(reversed(joined))
        if self._delimiter == "" and len(cells) == len(self._head) + 1:  # the index of a frame of pandas
            cells = cells[1:]
        if len(cells) != len(self._head) or not any(number(cell) != NONE for cell in cells):
            return None
        return self._told(1, DELIMITERS[self._delimiter], [dict(zip(self._head, cells, strict=True))])

    def _cells(self, line: str, delimiter: str) -> list[str]:
        """The cells of a row; none where quotes are not closed."""
        if delimiter in ("", "|"):
            line = line.strip()
            line = line[1:].removesuffix("|") if line[:1] == "|" else line
            cells = [each.strip(" *`") for each in (line.split("|") if delimiter else re.split(r"\s{2,}|\t", line))]
            cells = cells if delimiter or len(cells) > 2 else line.split()
        elif '"' in line:
            limit = csv.field_size_limit(len(line) + 1)
            try:
                rows = csv.reader(line.splitlines(keepends=True), delimiter=delimiter, strict=True)
                cells = [cell.strip() for cell in next(rows)]
            except csv.Error:
                cells = []
            finally:
                csv.field_size_limit(limit)
        else:
            cells = [cell.strip() for cell in line.split(delimiter)]
        if delimiter != "," and "," in line:  # decimal commas
            cells = [re.sub(r"^([-+]?\d+),(\d+(?:[eE][-+]?\d+)?)$", r"\1.\2", cell) for cell in cells]
        return cells

    def _header(self, line: str) -> Found | None:
        for delimiter in DELIMITERS:
            cells = self._cells(line, delimiter) if delimiter in line else []
            if [cell.lower() for cell in cells] == ["wall time", "step", "value"]:
                cells[2] = self._of_tensorboard()
            known = [cell for cell in cells if named(cell)[0]]
            if len(known) < (1 if delimiter else 2 + len(cells) // 4) or any(number(cell) != NONE for cell in cells):
                continue
            runs = {run: None for run in (cell.rpartition(" - ")[0] for cell in known) if run}
            if len(runs) > 1:
                raise InputError(
                    f"{self.name} holds the charts of {len(runs)} runs ({', '.join(runs)[:200]}); leave the columns of "
                    "one of them in it, or export its history."
                )
            self._head, self._delimiter = tuple(cells), delimiter
            self.kinds[1].update({f"a chart of the run {run}": None for run in runs})
            return 1, []
        return None

    def _of_tensorboard(self) -> str:
        """The metric that TensorBoard's CSV holds: its name stands in the name of the file."""
        tag = re.sub(r".*(?:^|-)tag-|\.\w+$", "", self.name.rpartition("/")[2]).removeprefix("train_")
        part = re.fullmatch(r"rewards_(.+?)(_mean|_std)?", tag)
        known = next((name for name in OURS if name.replace("/", "_") == tag), "")
        if not known and not part:
            raise InputError(
                f"{self.name} holds one metric of TensorBoard's, which only the name of the file can tell: call it as "
                "TensorBoard does, such as run-grpo-tag-train_reward.csv."
            )
        return known or f"rewards/{part[1]}/{(part[2] or '_mean')[1:]}" if part else known

    def _html(self, line: str) -> Found | None:
        """Rows of HTML become lines with tabs."""
        if "<tr" not in line:
            return None
        for _ in range(MANY):
            if "</tr" in line or (more := self._next()) is None:
                break
            line += more
        for row in reversed(re.findall(r"<tr\b.*?</tr|<tr\b.*", line, re.DOTALL)):
            cells = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]", row, re.DOTALL)
            texts = (html.unescape(re.sub(r"<[^>]*>|\s+", " ", cell)).strip() for cell in cells)
            self._again.appendleft("\t".join(texts))
        return 1, []

    def _printed(self, line: str) -> Found | None:
        start = line.find("{")
        if not QUOTED.search(line) and line.strip()[-1:] != "{":
            return None
        text, before = line[max(start, 0) :], line[: max(start, 0)]
        if start >= 0:
            for _ in range(MANY):
                if text.count("{") <= text.count("}") or not (more := self._next()):
                    break
                if more[0] == "{" or CONSOLE.search(more):
                    self._again.appendleft(more)
                    break
                text += more  # which a paste may have wrapped within a word
        found: list[Mapping[str, Any]] = []
        steps = [step for word, step in COUNT.findall(before) if named(word)[0] == "step"]
        bar = BAR.match(before)
        for group in _groups(text):
            entry: dict[str, Any] = {name: value for _, name, value in QUOTED.findall(group)}
            if not _tells(entry):
                continue
            if steps:
                entry.setdefault("step", steps[-1])
            elif bar or self._bar:
                entry["bar"] = bar[1] if bar else self._bar
            found.append(entry)
        return self._told(1, "printed dicts", found) if found else None

    def _pairs(self, line: str) -> Found | None:
        line = " ".join(re.sub("[│┃║]", "|", line).split())
        entry, end, found = dict[str, Any](), 0, list(PAIR.finditer(line))
        for match in found:
            name = BEFORE.split(line[end : match.start()])[-1].strip(" -*#.>:•")
            before, _, word = name.rpartition(" ")
            if before and not named(name)[0] and not OTHER.search(before.lower()):
                name = word
            our = named(name)[0]
            follows = line[match.end() : match.end() + 2].strip()[:1]
            if our and (not match[1].isspace() or len(found) > 2 or our == "step" or not follows.isalnum()):
                entry.setdefault(name, match[2])
            end = match.end()
        if not _tells(entry):
            steps = [value for name, value in entry.items() if named(name)[0] == "step"]
            self._step = float(steps[-1]) if steps else self._step
            return None
        if self._step is not None and not any(named(name)[0] == "step" for name in entry):
            entry["step"] = self._step
        return self._told(0, "pairs in a text", [entry])


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
        yield text[start:]


def _tells(entry: Mapping[str, Any]) -> bool:
    return any(our and our not in UNSAID for our, _ in map(named, entry))


def as_json(text: str) -> Any:
    """What a text says in JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

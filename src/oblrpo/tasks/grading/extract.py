"""Finding the final answer in a completion. Every step is linear in the text, and the text is cut first."""

import re

from oblrpo.tasks.grading.normal import levels

# An answer stands at the end; what comes before this many characters is not read.
MAX_TEXT = 20_000
# No gold answer of the benchmarks has over 300 characters, or over 6 brackets within each other.
MAX_ANSWER = 1_000
MAX_DEPTH = 30
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"^#### *(.+)$", re.MULTILINE)
_ANCHOR = re.compile(r"answer(?: is|s are|:| =)\s*:?\s*", re.IGNORECASE)
# A dollar sign that opens touches its formula, or both do not: `$5 and $6` are prices.
_MATH = re.compile(
    r"(?<!\\)\$\$([^$]{1,1000})\$\$"
    r"|(?<!\\)\$(?!\s)((?:\\\$|[^$\n]){1,1000}?)(?<![\s\\])\$(?!\d)"
    r"|(?<!\\)\$\s((?:\\\$|[^$\n]){1,1000}?)\s\$"
    r"|\\\(([^\n]{1,1000}?)\\\)"
    r"|\\\[([^\0]{1,1000}?)\\\]"
)
_NUMBER = re.compile(
    r"(?<![\w.^_/*\\{])[-\u2212+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)"
    r"(?:e[-+]?\d+)?(?:/\d+(?:\.\d+)?)?(?:\s?\\?%)?(?![\w^\\/*{]|\.\d)",
    re.ASCII,
)
# A number that is not the whole: of a formula (`3 + x`, `5 \sqrt{2}`), a list, a range, a mixed number, or words that
# change its value (`2 thirds`, `5 feet 3 inches`).
_GOES_ON = re.compile(
    r"\s*(?:[-+*/^=\\<>$\u00b2\u00b3\u00bc-\u00be\u2153-\u215e]|[x\u00d7\u00b7]\b|\d|[:;]\s*[-\d$\\(]"
    r"|(?:,|,? ?and|,? ?or)\s*[-\d$\\(]|and (?:a|one|two|three) (?:half|third|quarter)|or (?:more|less|fewer)\b"
    r"|(?:to|times|over|choose|out of|(?:more|less|fewer|greater) than) (?:[-$\\]*\d|[a-z]\b(?! [a-z]))"
    r"|hundred|thousand|[mbtr]+illion|dozen|percent|squared|cubed|factorial|mod\b|modulo|\(\s*mod|plus|minus|divided"
    r"|half|halves|thirds|quarters of|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths\b"
    r"|(?:feet|foot|pounds?|yards?|hours?|minutes?|years?|weeks?|days?|dollars?)\b,?(?: and)? \d)"
)
# The other half of a mixed number: `1 1/2`, `10 000`.
_COMES_FROM = re.compile(r"\d[ \u00a0]$")
# Between two formulas that are parts of one answer: `$1$, $2$ and $3$`.
_JOINT = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*", re.IGNORECASE)


def extract_answer(completion: str) -> str | None:
    r"""Return the answer: the last \boxed{}, else after `####` or `answer is`, else the last formula or number.

    The result is None if there is no answer, if the last box is never closed, or if the answer is too long or deep.
    """
    text = _CONTROL.sub(" ", completion[-MAX_TEXT:])
    answer = last_box(text) if _BOX.search(text) else _unboxed(text)
    if answer is None:
        return None
    answer = answer.strip().strip("*").strip()
    return answer if answer and len(answer) <= MAX_ANSWER and max(levels(answer)) <= MAX_DEPTH else None


def last_box(text: str) -> str | None:
    r"""Return what the last \boxed{} holds; None if there is no box, or if the last one is never closed."""
    boxes = list(_BOX.finditer(text))
    return _boxed(text, boxes[-1].end()) if boxes else None


def _boxed(text: str, start: int) -> str | None:
    r"""Return the balanced group at `start`, or the word there (`\boxed 5`); None if the group is never closed."""
    if not text.startswith("{", start):
        word = re.compile(r"[^\s$.,;]+").match(text, start)
        return word[0] if word else None
    level = 0
    for place in range(start, min(len(text), start + MAX_ANSWER + 2)):
        escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
        level += 0 if escaped else (text[place] == "{") - (text[place] == "}")
        if level == 0:
            return text[start + 1 : place]
    return None


def _unboxed(text: str) -> str | None:
    hashes = _HASHES.findall(text)
    if hashes:
        return str(hashes[-1])
    anchors = list(_ANCHOR.finditer(text))
    answer = _sentence(text[anchors[-1].end() :][: 2 * MAX_ANSWER]) if anchors else None
    return answer or _last(text)


def _sentence(text: str) -> str | None:
    """Return the answer at the start of `text`: formulas that belong together, a number, or the words of a sentence."""
    formula = _MATH.search(text)
    line = re.split(r"\n|(?<=[^\d])\.(?:\s|$)|\.$", text, maxsplit=1)[0]
    number = _NUMBER.match(line.lstrip("* :"))
    if formula and not text[: formula.start()].strip("* :\n"):
        return _joined(text, formula)
    if number and not _GOES_ON.match(number.string, number.end()):
        return number[0]
    if formula and formula.start() <= len(line):
        return _joined(text, formula)
    return line.strip("* :").rstrip(".")


def _joined(text: str, formula: "re.Match[str]") -> str:
    parts = [_inside(formula)]
    while following := _MATH.search(text, formula.end()):
        between = text[formula.end() : following.start()]
        if len(between) > 20 or not _JOINT.fullmatch(between):
            break
        parts.append(_inside(following))
        formula = following
    return ", ".join(parts)


def _last(text: str) -> str | None:
    """Return the last formula, or the last number if it stands after that."""
    formula = None
    for formula in _MATH.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    number = None
    for number in _NUMBER.finditer(text, formula.end() if formula else 0):  # noqa: B007
        pass
    if number:
        whole = not _GOES_ON.match(text, number.end()) and not _COMES_FROM.search(text[: number.start()][-3:])
        return number[0] if whole else None
    return _inside(formula) if formula else None


def _inside(formula: "re.Match[str]") -> str:
    return next(group for group in formula.groups() if group is not None)

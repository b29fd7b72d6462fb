"""Finding where the final answer stands in a completion. Every step is linear in the text, which is cut first."""

import re
from itertools import accumulate

from oblrpo.tasks.grading.normal import levels, listed, rewriting, tidy
from oblrpo.tasks.grading.prose import MAX_ANSWER, denied, inside, last, sentence
from oblrpo.tasks.grading.units import NAMES

# An answer stands at the end; what comes before this many characters is not read.
MAX_TEXT = 20_000
# No gold answer of the benchmarks has over 6 brackets within each other.
MAX_DEPTH = 30
# Boxes with more characters than this between them are not parts of one answer.
MAX_GAP = 300
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# From here on a model writes a question of its own.
_RUN_ON = re.compile(r"(?<=\S)\s*(?:\n(?:Question|Q|Human|User): |<\|(?:im_end|eot_id|endoftext)\|>)")
_TAG = re.compile(r"<((?:final_?)?answer)>(.*?)(?=</?\1>|\Z)", re.IGNORECASE | re.DOTALL)
_TAGS = "s|i|em|u|code|mark|p|div|span|center|h[1-6]"
_unmarked = rewriting(
    (r"~~[^~\n]{1,80}~~|<(s|del)>[^<>]{1,80}</\1>", " "),  # struck out
    (r"</?(?:b|strong)>", "**"),
    (r"\\(?:textbf|textit|emph)\{([^{}]{1,80})\}", r"**\1**"),
    (r"<br ?/?>", "\n"),
    (rf"(?<=\d)(?=[A-Za-z])((?:{NAMES})s?(?![A-Za-z(014-9]))", r" \1"),
    (r"<sup>([^<>]{1,20})</sup>", r"^{\1}"),
    (rf"<\|\w{{1,30}}\|>|```[a-z]*|`|</?(?:{_TAGS})(?: [a-z]+=[^<>]{{1,80}})?>", ""),
    (r"\\(?:begin|end)\{(?:align|equation|gather)(?:ed)?\*?\}", ""),
    flags=re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9_)*}\\])(\*{1,3}|__?)(?=[^\s*{])([^\n]{1,200}?)(?<=[^\s*])\1(?![A-Za-z0-9_({*])")
# `oxed{`: JSON has read `\b` as a control character.
_BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox)(?![A-Za-z])|(?<![A-Za-z\\])b?oxed(?=\{))\s*")
_BARE = re.compile(r"[-+]?\d(?:[\d.,/]*\d)?")
_PLACEHOLDER = re.compile(
    r"(?:\\text\{)?[\s.\u2026_?[]*(?:(?:your |the |final )*answers?(?: here)?)?[\s.\u2026_?\]]*\}?", re.I
)
_NAMED = r"(?<![A-Za-z\\])(?<![-+*/^] )([A-Za-z](?:_\{?\w{1,3}\}?)?)\s*=[\s$*]*(?:\\[(\[]\s*)?"
_NAME = re.compile(_NAMED + "$")
_BETWEEN = re.compile(
    r"(?:[^\S\n]|[$,;&*\u3001\uff0c]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}"
    rf"|(?:and|or)(?![A-Za-z])|\u548c|\u6216)*(?:{_NAMED})?"
)
# A box that is a part of a formula has one of these before it, or one behind it.
_OPERATOR = re.compile(r"(?:[-+/^\d]|[\w)}] ?\*|\\(?:cdot|times) *|\\frac\{|[\d}] *[+/] *)\Z")
_OPERAND = re.compile(r" ?(?:[-+*/^]|\\cdot|\\times) ?(?!\{?\\(?:circ|text))[\d\\{]|\}\{|\\(?:pi|sqrt)(?![a-z])")
# What takes an answer back, and then gives another; between boxes, what makes the last the only one.
_TURNS = "wait|no(?=[,.:])|but|however|actually|oops|sorry|mistake|error|wrong|correction|second thought|hold on"
_TURN = re.compile(
    rf"\b(?:{_TURNS}|not|hmm|instead|rather|forgot|should be|(?:in)?correct\w*|final\w*|answers? is)\b", re.I
)
_LATER = re.compile(
    rf"\b(?:(?:{_TURNS})\b"
    r"(?:(?:(?!\bif\b)[^\n]){0,150}?\b(?:it|that|I|answer|result|total)(?:'s| is| was| should be| get| got| meant)"
    r"(?: actually)?)?"
    r"|answer(?: is| should be|:)):?\s(?=[$\\(]*-?\d)",
    re.I,
)
_GAVE_UP = re.compile(
    r"\b(?:(?:can ?not|can't|unable to|could not) (?:be )?(?:determine|solve|answer|find|help)|not enough information"
    r"|(?:don't|do not) know|give up|depends on|infinitely many|no solution)",
    re.I,
)
_HASHES = re.compile(r"^####(?!#) *(?=\S)", re.MULTILINE)
_ANCHOR = re.compile(
    r"(?<!wrong )(?<!first )answers?(?: (?:to|for) [^.:=\n]{1,80}?)?\s?"
    r"(?:(?:is|are|(?:w|sh)ould be|must be|equals)\b|[:\uff1a=]|$)"
    r"|(?:option|choice)(?: is\b|:| (?=\(?[A-J]\)? is (?:the )?(?:correct|right)))"
    r"|\u7b54\u6848?\s?(?:[\u662f\u4e3a\u70ba:\uff1a]|$)|\u9009[:\uff1a]?\s?(?=[A-J](?![A-Za-z]))",
    re.IGNORECASE | re.MULTILINE,
)
# A letter of multiple choice at the end, or a word that is all there is.
_LETTER = re.compile(
    r"(\([A-J]\))(?=\W*\Z)|\A[\s(]*(?:(?:So|Thus|Therefore|Hence),? )?([A-Za-z]+)(?=[\s.!)]*\Z)"
    r"|(?i:\b(?:pick|choose|select|option|choice) )([A-J])(?=\W*\Z)"
    r"|\b([A-J])(?= is the (?:correct |right )?(?:answer|option|choice))"
)
# What is said of an answer that was given before.
_VERDICT = re.compile(r"(?:(?:in)?correct|right|wrong|reasonable|valid|verified|consistent|clear|unique)\b", re.I)
_STARTS = re.compile(r"[-+\u2212$\u20ac(\\\d](?!\d*[.)]\s)")


def extract_answer(completion: str, several: bool = False) -> str | None:
    r"""Return what <answer> or the last \boxed{} holds, else what follows `####` or `answer is`, else the last value.

    Boxes side by side are one answer, a list. With `several` (the gold answer is a list) so are boxes near each other,
    if no word between them takes the first back. The last value is a bold, a formula or a number. The result is None if
    there is no answer, if the last box is never closed, or if the answer is too long or deep.
    """
    text = _CONTROL.sub(" ", completion[-MAX_TEXT:])
    said = text.rpartition("</think>")[2]  # what was thought counts only if nothing follows
    text = said if said.strip() else text
    run_on = _RUN_ON.search(text)
    answer = (run_on and _find(text[: run_on.start()], several)) or _find(text, several)
    answer = (answer or "").strip().strip("*").strip()
    return answer if answer and len(answer) <= MAX_ANSWER and max(levels(answer)) <= MAX_DEPTH else None


def is_list(answer: str) -> bool:
    """Return whether an answer is a list or a set of several."""
    text = tidy(answer)
    return len(listed(text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text, thousands=True)) > 1


def last_box(text: str) -> str | None:
    r"""Return what the last \boxed{} holds that is not empty; None if there is none, or if the last is never closed."""
    contents = (_boxed(text, box.end())[0] for box in reversed(list(_BOX.finditer(text))))
    return next((box for box in contents if box is None or not _PLACEHOLDER.fullmatch(box)), None)


def _find(text: str, several: bool) -> str | None:
    """Return the answer by the first of these ways that finds one: tags, boxes, `####`, "the answer is", the last."""
    tag = next((tag for tag in reversed(list(_TAG.finditer(text))) if not _PLACEHOLDER.fullmatch(tag[2])), None)
    if tag and not _BOX.search(text, tag.end()):
        answer, end = _boxes(tag[2], several)[0] or _unboxed(tag[2], entire=True), tag.end()
    else:
        answer, end = _boxes(text, several)
        if answer is None:
            return None
        if not answer:
            return _unboxed(text)
    return _corrected(text[end:]) or answer


def _corrected(rest: str) -> str | None:
    """Return what is said to be the answer behind one that stood out (`No, wait, it is 8`)."""
    rest, bolds = _without_markup(rest)
    later = list(_LATER.finditer(rest))
    return sentence(rest, later[-1].end(), bolds)[0] if later else None


def _boxes(text: str, several: bool) -> tuple[str | None, int]:
    r"""Return the last \boxed{}, or the list that it ends, and where it ends; "" without, None if it is never closed.

    An empty box, or one around "answer", mentions the format.
    """
    parts: list[tuple[str, str]] = []
    start = last = 0
    near = several
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _boxed(text, box.end())
        if content is None and not parts:
            return None, 0
        if content is None or _PLACEHOLDER.fullmatch(content) or denied(text, box.start(), end):
            if parts:
                break
            continue
        if parts:
            beside = _BETWEEN.fullmatch(text, end, start)
            near = near and (len(parts) > 1 or not (beside or is_list(parts[0][1])))
            close = end <= start <= end + MAX_GAP  # a box within a box ends behind it
            if not close or not (beside or (near and not _TURN.search(text, end, start))):
                break
        start, last = box.start(), last or end
        if not parts and (_OPERATOR.search(text[max(0, start - 10) : start]) or _OPERAND.match(text, end)):
            return None, 0
        name = _NAME.search(text, max(0, start - 20), start)
        parts.insert(0, (f"{name[1]} = " if name and "=" not in content else "", content))
    if len({content for _, content in parts}) == 1 and (len(parts) == 1 or not several):
        return parts[0][1], last
    return ", ".join(name + content for name, content in parts), last


def _boxed(text: str, start: int) -> tuple[str | None, int]:
    r"""Return the balanced group at `start`, or the token (`\boxed 5`), and where it ends; None if never closed."""
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return (bare[0], bare.end()) if bare else ("", start)
    level = 0
    for place in range(start, min(len(text), start + MAX_ANSWER + 2)):
        escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
        level += 0 if escaped else (text[place] == "{") - (text[place] == "}")
        if level == 0:
            return text[start + 1 : place], place + 1
    return None, start


def _unboxed(text: str, entire: bool = False) -> str | None:
    text, bolds = _without_markup(text)
    for hashes in reversed(list(_HASHES.finditer(text))[-10:]):
        rest = text[hashes.end() :]
        if _STARTS.match(rest) or "\n" not in rest.strip():  # otherwise it is a heading
            answer, end = sentence(text, hashes.end(), bolds)
            return _corrected(text[end:]) or answer
    for anchor in reversed(list(_ANCHOR.finditer(text))[-10:]):
        answer, end = sentence(text, anchor.end(), bolds)
        if answer and not _VERDICT.match(answer):
            return _corrected(text[end:]) or answer
    if entire:
        return sentence(text, 0, bolds)[0]
    if letter := _LETTER.search(text):
        return None if denied(text, letter.start(), letter.end()) else inside(letter)
    return None if _GAVE_UP.search(text, max(0, len(text) - 300)) else last(text, bolds, 0, len(text))


def _without_markup(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without HTML, backticks and emphasis, and where in it what was emphasized begins and ends."""
    pieces = _EMPHASIS.split(_unmarked(text))
    del pieces[1::3]  # the asterisks
    ends = list(accumulate(map(len, pieces)))
    return "".join(pieces), list(zip(ends[::2], ends[1::2], strict=False))

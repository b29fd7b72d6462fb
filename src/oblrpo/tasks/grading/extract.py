"""Finding the final answer in a completion. Every step is linear in the text, and the text is cut first."""

import re
from itertools import accumulate

from oblrpo.tasks.grading.normal import levels, listed, tidy
from oblrpo.tasks.grading.units import without_unit

# An answer stands at the end; what comes before this many characters is not read.
MAX_TEXT = 20_000
# No gold answer of the benchmarks has over 300 characters, or over 6 brackets within each other.
MAX_ANSWER = 1_000
MAX_DEPTH = 30
# Boxes with more characters than this between them are not parts of one answer.
MAX_GAP = 300
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TAGS = "i|em|u|code|mark|p|div|span|center|h[1-6]"
_MARKUP = {
    re.compile(pattern, re.IGNORECASE): replacement
    for pattern, replacement in {
        r"</?(?:b|strong)>": "**",
        r"\\(?:textbf|textit|emph)\{([^{}]{1,80})\}": r"**\1**",
        r"<br ?/?>": "\n",
        r"(?<=\d)(km/h|mph|[ckm]m|kg|mg|ml|ft|hrs?|mins?)\b": r" \1",
        r"<sup>([^<>]{1,20})</sup>": r"^{\1}",
        rf"<\|\w{{1,30}}\|>|</?s>|```[a-z]*|`|</?(?:{_TAGS})(?: [a-z]+=[^<>]{{1,80}})?>": "",
        r"\\(?:begin|end)\{(?:align|equation|gather)(?:ed)?\*?\}": "",
    }.items()
}
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9_)*}\\])(\*{1,3}|__?)(?=[^\s*{])([^\n]{1,200}?)(?<=[^\s*])\1(?![A-Za-z0-9_({*])")
# Bold that is no answer: `**Step 3:**`.
_LABEL = re.compile(r"(?:step|part|case|note|check|method|question|problem|example)\b.*|.*:\s*", re.IGNORECASE)
# `oxed{`: JSON has read `\b` as a control character.
_BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox)(?![A-Za-z])|(?<![A-Za-z\\])b?oxed(?=\{))\s*")
_NOT = r"(?:\bnot|n't|\bcannot)(?: be| equal)? [\s$]*(?:\\[(\[]\s*)?$"
_BARE = re.compile(r"[-+]?\d(?:[\d.,/]*\d)?|\\[A-Za-z]+[^\s$.,;]*|[A-Za-z](?=\s*(?:\$|\Z))")
_PLACEHOLDER = re.compile(r"(?:\\text\{)?[\s.\u2026_?]*(?:(?:your |the |final )*answers?)?[\s.\u2026_?]*\}?", re.I)
_NAMED = r"(?<![A-Za-z\\])(?<![-+*/^] )([A-Za-z](?:_\{?\w{1,3}\}?)?)\s*=[\s$*]*(?:\\[(\[]\s*)?"
_NAME = re.compile(_NAMED + "$")
_BETWEEN = re.compile(
    r"(?:[^\S\n]|[$,;&*\u3001\uff0c]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}"
    rf"|(?:and|or)(?![A-Za-z])|\u548c|\u6216)*(?:{_NAMED})?"
)
# After one of these words the boxes before it are not the answer.
_RETRACTED = re.compile(r"\b(?:wait|mistake|wrong|incorrect|correction)\b", re.IGNORECASE)
_TURN = re.compile(
    _RETRACTED.pattern
    + r"|\b(?:error|oops|hmm|actually|instead|rather|but|forgot|should be|correct\w*|final\w*|answers? is)\b",
    re.I,
)
_TAG = re.compile(r"<((?:final_?)?answer)>", re.IGNORECASE)
_HASHES = re.compile(r"^####(?!#) *(?=\S)", re.MULTILINE)
_ANCHOR = re.compile(
    r"answers?(?: (?:to|for) [^.:=\n]{1,80}?)?\s?(?:(?:is|are|was|(?:w|sh)ould be|must be|equals)\b|[:\uff1a=]|$)"
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
_FILLER = re.compile(
    r"(?:[\s:\uff1a*=\u2248}]|(?:approximately|about|exactly|simply|just|therefore|thus|equal to|option|choice)\b)*",
    re.I,
)
# What is said of an answer that was given before.
_JUDGED = re.compile(r"(?:correct|right|reasonable|valid|verified|consistent|confirmed|clear|unique)\b", re.I)
_END = re.compile(r"\n|(?<!\\)[.!?](?=\s|$)|\u3002|,? (?:because|since|as|so|where|is (?:the )?(?:correct|right))\b")
_BREAK = re.compile(r"[.!?]\s|\n|\u3002")
# A dollar sign that opens touches its formula, or both do not: `$5 and $6` are prices.
_MATH = re.compile(
    r"(?<!\\)\$\$([^$]{1,1000})\$\$"
    r"|(?<!\\)\$(?!\s)((?:\\\$|[^$\n]){1,1000}?)(?<![\s\\])\$(?!\d)"
    r"|(?<!\\)\$\s((?:\\\$|[^$\n]){1,1000}?)\s\$"
    r"|\\\(([^\n]{1,1000}?)\\\)"
    r"|\\\[([^\0]{1,1000}?)\\\]"
)
# A formula without LaTeX: numbers, letters that stand alone, functions, brackets with such in them, and operators.
_AMOUNT = (
    r"(?<![\d.])(?:\\?[$\u20ac\u00a3])?"
    r"(?:(?:\d{1,3}(?:[,\u2009\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
)
_WORD = r"(?:sqrt|log|ln|exp|sin|cos|tan|pi|[A-Za-z])(?![A-Za-z"
_IN = rf"(?:[-\d ,.;:+*/^=!|\u221a\u03c0\u221e\u2212]|{_WORD}]))"
_TERM = (
    rf"[-+\u2212]?(?:{_AMOUNT}|[\u221a\u03c0\u221e\u00b2\u00b3\u00b9\u2070-\u2079]|{_WORD}(])|[A-Za-z]\w{{0,9}}(?=\()|[(\[{{](?:{_IN}|\({_IN}{{0,40}}\)){{1,80}}[)\]}}])+"
    r"(?:\s?\\?%| percent\b|!(?=\s?[-+*/=a-z\d,.;)]))?"
)
_SUM = (
    rf"{_TERM}(?: ?(?:[-+*/^=<>\u2212\u2013\u00d7\u00b7\u00f7\u2264\u2265\u2260\u2248]|\*\*|[<>!]=) ?{_TERM}"
    rf"|(?<=\d)(?: : |:)(?=\d){_TERM}){{0,20}}"
)
_PLAIN = re.compile(
    rf"(?<![\w.^_/*\\{{}}]){_SUM}"
    rf"((?:,? (?:and|or|et|und|y) |, ?)(?=[-\u2212$\u20ac\u00a3\u221a(\[\d.\\]|[A-Za-z]\w? ?=){_SUM}){{0,40}}"
    r"(?![\w^\\*{]|/(?![a-z]{2})|\.\d)",
    re.ASCII,
)
_LARGER = r"(?:feet|foot|pounds?|yards?|hours?|minutes?|years?|weeks?|days?|dollars?)\b"
# A formula that is not the whole: of a longer one (`5 \sqrt{2}`), a list, a range, a mixed number, or words that
# change its value (`2 thirds`, `5 feet 3 inches`).
_GOES_ON = re.compile(
    r"\s*(?:[-+*^=\\<>\u00bc-\u00be\u2153-\u215e]|/(?![a-z]{2})|\$(?![\s.,]|$)|[x\u00d7\u00b7]\b|\d|[:;]\s*[-\d$\\(]"
    r"|(?:,|,? ?and|,? ?or)\s*[-\d$\\(]|and (?:a|one|two|three) (?:half|third|quarter)|or (?:more|less|fewer)\b"
    r"|(?:to|times|over|choose|out of|(?:more|less|fewer|greater) than) (?:[-$\\]*\d|[a-z]\b(?! [a-z]))"
    r"|hundred|thousand|[mbtr]+illion|dozen|percent|squared|cubed|factorial|mod\b|modulo|\(\s*mod|plus|minus|divided"
    r"|(?:degrees? )?below|half|halves|thirds|quarters of|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths\b"
    rf"|{_LARGER},?(?: and)? \d)"
)
# The other half of a mixed number (`1 1/2`, `10 000`), of a sum (`\sqrt{2} + 5`), or a word that changes the value.
_COMES_FROM = re.compile(
    r"\d[ \u00a0]$|[}\d)\]$] *[-+*/^] ?$|[A-Za-z][-+*/^]$|\\[A-Za-z]+\s?$"
    r"|\d(?: to | out of | ?[-\u2013:] ?)$|\b(?:negative|minus|than|ln|log|sin|cos|tan|sqrt|root of|choose|mod|times) $"
    rf"|\d {_LARGER},? (?:and )?$|{_NOT}"
)
_MEASURE = re.compile(
    r"\u00b0[CF]?|\s?(?!in\b)((?:square |sq |cubic )?[A-Za-z]+(?:/[A-Za-z]+| per [a-z]+)?(?:\^?[23])?)(?![A-Za-z])"
)
_NUMERIC = re.compile(r"[\d\u221a\u03c0\u221e]|sqrt")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[\u4e00-\u9fff]")
_STARTS = re.compile(r"[-+\u2212$\u20ac(\\\d](?!\d*[.)]\s)")
_BULLET = re.compile(r"\n\(?\w{1,2}[.)]")
# Between two formulas that are parts of one answer: `$1$, $2$ and $3$`.
_JOINT = re.compile(r"\s*(?:[,;]\s*(?:(?:and|or)\b\s*)?|(?:and|or)\b\s*)", re.IGNORECASE)


def extract_answer(completion: str, several: bool = False) -> str | None:
    r"""Return what <answer> or the last \boxed{} holds, else what follows `####` or `answer is`, else the last value.

    Boxes side by side are one answer, a list. With `several` (the gold answer is a list) so are boxes near each other,
    if no word between them takes the first back. The last value is a bold, a formula or a number. The result is None if
    there is no answer, if the last box is never closed, or if the answer is too long or deep.
    """
    text = _CONTROL.sub(" ", completion[-MAX_TEXT:])
    answer = _find(text.rpartition("</think>")[2], several) or _find(text, several)
    if answer is None:
        return None
    answer = answer.strip().strip("*").strip()
    return answer if answer and len(answer) <= MAX_ANSWER and max(levels(answer)) <= MAX_DEPTH else None


def is_list(answer: str) -> bool:
    """Return whether an answer is a list or a set of several."""
    text = tidy(answer)
    return len(listed(text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text, thousands=True)) > 1


def last_box(text: str) -> str | None:
    r"""Return what the last \boxed{} holds that is not empty; None if there is none, or if the last is never closed."""
    held = (_boxed(text, box.end())[0] for box in reversed(list(_BOX.finditer(text))))
    return next((inside for inside in held if inside is None or not _PLACEHOLDER.fullmatch(inside)), None)


def _find(text: str, several: bool) -> str | None:
    for tag in reversed(list(_TAG.finditer(text))[-10:]):
        inside, _, after = text[tag.end() :].partition(f"</{tag[1]}>")
        if inside.strip() and not _BOX.search(after):
            return _find(inside, several) if _BOX.search(inside) else _unboxed(inside, whole=True)
    answer, end = _boxes(text, several)
    if not answer:
        return None if answer is None else _unboxed(text)
    wait = _RETRACTED.search(text, end)
    return (wait and _ANCHOR.search(text, wait.end()) and _unboxed(text[wait.end() :])) or answer


def _boxes(text: str, several: bool) -> tuple[str | None, int]:
    r"""Return the last \boxed{}, or the list that it ends, and where it ends; "" without, None if it is never closed.

    An empty box, or one around "answer", mentions the format.
    """
    parts: list[tuple[str, str]] = []
    start = last = 0
    near = several
    for box in reversed(list(_BOX.finditer(text))):
        held, end = _boxed(text, box.end())
        if held is None and not parts:
            return None, 0
        if (
            held is None
            or _PLACEHOLDER.fullmatch(held)
            or re.search(_NOT, text[max(0, box.start() - 20) : box.start()])
        ):
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
        name = _NAME.search(text, max(0, start - 20), start)
        parts.insert(0, (f"{name[1]} = " if name and "=" not in held else "", held))
    if len({held for _, held in parts}) == 1 and (len(parts) == 1 or not several):
        return parts[0][1], last
    return ", ".join(name + held for name, held in parts), last


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


def _unboxed(text: str, whole: bool = False) -> str | None:
    text, bolds = _without_markup(text)
    for hashes in reversed(list(_HASHES.finditer(text))[-10:]):
        rest = text[hashes.end() :]
        if _STARTS.match(rest) or "\n" not in rest.strip():  # otherwise it is a heading
            return _sentence(text, hashes.end(), bolds)
    for anchor in reversed(list(_ANCHOR.finditer(text))[-10:]):
        answer = _sentence(text, anchor.end(), bolds)
        if answer and not _JUDGED.match(answer):
            return answer
    letter = _LETTER.search(text)
    return _sentence(text, 0, bolds) if whole else _inside(letter) if letter else _last(text, bolds, 0, len(text))


def _without_markup(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without HTML, backticks and emphasis, and where in it what was emphasized begins and ends."""
    for pattern, replacement in _MARKUP.items():
        text = pattern.sub(replacement, text)
    pieces = _EMPHASIS.split(text)
    del pieces[1::3]  # the asterisks
    ends = list(accumulate(map(len, pieces)))
    return "".join(pieces), list(zip(ends[::2], ends[1::2], strict=False))


def _sentence(text: str, start: int, bolds: list[tuple[int, int]]) -> str | None:
    """Return the answer that begins at `start`: formulas that belong together, a number, or the words of a sentence."""
    filler = _FILLER.match(text, start)
    start = filler.end() if filler else start
    stop = start + 2 * MAX_ANSWER
    formula = _MATH.search(text, start, stop)
    if formula and formula.start() == start:
        return _joined(text, formula)
    number = _PLAIN.match(text, start, stop)
    end = _END.search(text, start, stop)
    line = text[start : end.start() if end else stop].strip()
    prose = len(_WORDS.findall(line))
    if number and _NUMERIC.search(number[0]):
        return ((prose or number.end() >= start + len(line)) and _whole(text, number)) or line
    if formula and formula.start() <= start + len(line):
        return _joined(text, formula)
    return (prose > 1 and _last(text, bolds, start, start + len(line))) or line


def _joined(text: str, formula: "re.Match[str]") -> str:
    parts = [_inside(formula)]
    while following := _MATH.search(text, formula.end()):
        between = text[formula.end() : following.start()]
        if len(between) > 20 or not _JOINT.fullmatch(between):
            break
        parts.append(_inside(following))
        formula = following
    return ", ".join(parts) if len(parts) > 1 else _with_measure(text, parts[0], formula.end())


def _last(text: str, bolds: list[tuple[int, int]], start: int, end: int) -> str | None:
    """Return what is in bold in the last sentence with an answer, else the last number there, else the last formula."""
    formulas: list[re.Match[str]] = []
    for formula in _MATH.finditer(text, start, end):
        if formulas and not _JOINT.fullmatch(text, formulas[-1].end(), formula.start()):
            formulas = []
        formulas.append(formula)
    after = formulas[-1].end() if formulas else start
    numbers = [number for number in _PLAIN.finditer(text, after, end) if _NUMERIC.search(number[0])]
    found, until = (numbers[-1].start(), numbers[-1].end()) if numbers else (after, after)
    for begins, ends in reversed([bold for bold in bolds if start <= bold[0] and bold[1] <= end]):
        held = text[begins:ends]
        if _LABEL.fullmatch(held) or text.startswith(":", ends) or _BULLET.fullmatch(text, begins - 1, ends):
            continue
        value = bool(_NUMERIC.search(held) or _MATH.search(held))
        if not _BREAK.search(text, *((ends, found) if found > ends else (until, begins))):
            if value:
                return _last(text, [], start, ends if found > ends else end) or (held if " " in held else None)
            if until <= begins and ends - begins < 60:
                return held
        break
    if numbers:
        return _whole(text, numbers[-1])
    return _joined(text, formulas[0]) if formulas else None


def _whole(text: str, number: "re.Match[str]") -> str | None:
    """Return the number or formula if nothing beside it changes it, with its unit; of `9 * 2 = 18` the last side."""
    value, (*sums, last) = number[0], re.split(r"(?<![<>!])=", number[0])
    if sums and (
        (len(sums) > 1 and not number[1]) or not re.search(r"(?!x\d|and|or|et|y)(?<![A-Za-z])[A-Za-z]", value)
    ):
        value = last.strip()
    elif _COMES_FROM.search(text[max(0, number.start() - 24) : number.start()]):
        return None
    if _GOES_ON.match(text, number.end()) or re.fullmatch(r"\d+[-\u2013]\d+", value):
        return None
    return _with_measure(text, value, number.end())


def _with_measure(text: str, value: str, end: int) -> str:
    """Return the value with the unit after it, if that is a measure, which may differ from the gold answer's."""
    measure = _MEASURE.match(text, end)
    known = measure and without_unit(tidy(value + (" " + measure[1] if measure[1] else measure[0])))[1]
    return f"{value} {measure[1] or measure[0]}" if measure and known else value


def _inside(formula: "re.Match[str]") -> str:
    return next(group for group in formula.groups() if group is not None)

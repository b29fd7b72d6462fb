"""Finding where the final answer stands in a completion. Every step is linear in the text, which is cut first.

A value in prose is the formula or number that a sentence gives; further down stand the words that change or deny it.
"""

import re
from itertools import accumulate

from oblrpo.tasks.grading.normal import levels, listed, rewriting, tidy
from oblrpo.tasks.grading.units import NAMES, without_unit

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


# No gold answer of the benchmarks has over 300 characters.
MAX_ANSWER = 1_000
_FILLER = re.compile(r"(?:[\s:\uff1a*=\u2248}]|(?:about|exactly|just|therefore|equal to|option|choice)\b)*", re.I)
_END = re.compile(r"\n|(?<!\\)[.!?](?=\s|$)|\u3002|,? (?:because|since|as|so|where|is (?:the )?(?:correct|right))\b")
_BREAK = re.compile(r"[.!?]\s|\n|\u3002")
# A dollar sign that opens touches its formula, or both do not: `$5 and $6` are prices.
_MATH = re.compile(
    r"(?<!\\)\$\$([^$]{1,1000})\$\$"
    r"|(?<!\\)\$(?!\s)((?:\\\$|[^$\n]){1,1000}?)(?<![\s\\])\$(?!\d)"
    r"|(?<!\\)\$\s((?:\\\$|[^$\n]){1,1000}?)\s\$"
    r"|\\\(((?:(?!\\[()])[^\n]){1,1000})\\\)"
    r"|\\\[((?:(?!\\[\[\]])[^\0]){1,1000})\\\]"
)
# A formula without LaTeX: numbers, letters that stand alone, functions, brackets with such in them, and operators.
_AMOUNT = (
    r"(?<![\d.])(?:\\?[$\u20ac\u00a3\u00a5])?"
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
# A formula that is not complete: of a longer one (`5 \sqrt{2}`), a list, a range, a mixed number, or words that
# change its value (`2 thirds`, `5 feet 3 inches`).
_CONTINUES = re.compile(
    r"\s*(?:[-+*^=\\<>\u6216\u4e07\u4ebf\u500d\u6298\u00bc-\u00be\u2153-\u215e]|/(?![a-z]{2})|\$(?![\s.,]|$)"
    r"|[x\u00d7\u00b7]\b|\d|[:;]\s*[-\d$\\(]|(?:,|,? ?and)\s*[-\d$\\(]|,? ?\(?or\b|(?:with )?remainder"
    r"|and (?:a|one|two|three) (?:half|third|quarter)|is (?:not|wrong)\b"
    r"|(?<=[%t] )of \$?\d|to the (?:power|\d)"
    r"|(?:to|through|times|over|choose|out of|(?:more|less|greater) than) (?:[-$\\]*\d|[a-z]\b(?! [a-z]))"
    r"|hundred|thousand|[mbtr]+illion|dozen|percent|squared|cubed|factorial|mod\b|modulo|\(\s*mod|plus|minus|divided"
    r"|(?:degrees? )?below|half|halves|thirds|quarters of|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths\b"
    rf"|{_LARGER},?(?: and)? \d)"
)
# The other half of a mixed number (`1 1/2`, `10 000`), of a sum (`\sqrt{2} + 5`), or a word that changes the value.
_COMES_FROM = re.compile(
    r"\d[ \u00a0]$|\u00b1 ?$|[}\d)\]$] *[-+*/^] ?$|[A-Za-z][-+*/^]$|\\[A-Za-z]+\s?$"
    r"|\d(?: to | out of | ?[-\u2013:] ?)$|\b(?:negative|minus|than|ln|log|sin|cos|tan|sqrt|root of|choose) $"
    rf"|\d {_LARGER},? (?:and )?$|\b(?:half|third|quarter|square|cube|sum|product|%|percent) of $"
    r"|\b(?:or|mod|times|power|twice|double|triple|at least|at most|subtract|divided? by|remainder) $"
)
# Words that make another answer of a formula.
_CHANGED = re.compile(r",? ?(?:\(?or\b|if\b|times\b|to the (?:power|\d))")
# What denies the value behind it in the same clause, and the value before it.
_DENIED = re.compile(
    r"(?:\b(?:not(?! only)|cannot|never|neither|nor|doubt|instead of|rather than|unlikely|no longer|rule out|eliminate"
    r"|reject|discard|maybe|possibly|anything but|different from|wrong)\b|n't\b|\u4e0d\u662f)"
    r"(?:(?!\b(?:but|which)\b)[^.,:;!?\n]){0,40}$",
    re.I,
)
_REFUSED = re.compile(
    r"[\s$)\\\]]*(?:(?:is|are|was|would be)(?:(?:n't| not)(?: an?| the| my)? (?:answer|solution|correct|right|valid)"
    r"| (?:an? )?(?:too|wrong|incorrect|invalid|impossible|rejected|extraneous))\b"
    r"|, which cannot|does(?:n't| not)(?: work| fit| satisfy|\W*$)|[^.!?\n]{0,60}\?)"
)
# A value beside the point, if another stands before it: `18 eggs in 3 boxes`, `18 (3 a day)`.
_ASIDE = re.compile(
    r"\b(?:for|in|after|every|within|at|over|during|per|on day|of the|of those)"
    r"(?: all| about)?(?: the| those)?(?: last)? [$\\(]*$"
    r"|\([^()\n]{0,60}$|\b(?:because|since)\b[^.,:\n\d]{0,60}$",
    re.I,
)
# A number that counts parts of the text: `Step 5`, `5. Done`, `**Case 2**`.
_COUNTED = "step|part|case|equation|theorem|lemma|method|problem|question|example|figure"
_COUNTER = re.compile(rf"(?:\b(?:{_COUNTED}|(?:confidence|score|references):) *|(?:\b[b-e]\)|case \w):? )[(\[]?$", re.I)
_ITEM = re.compile(r"^\d{1,2}[.)] +\S", re.MULTILINE)
_LABEL = re.compile(rf"(?:{_COUNTED})\b.*|.*:\s*", re.IGNORECASE)
_BULLET = re.compile(r"\n\(?\w{1,2}[.)]")
_MEASURE = re.compile(
    r"\u00b0[CF]?|\s?(?!in\b)((?:square |sq |cubic )?[A-Za-z]+(?:/[A-Za-z]+| per [a-z]+)?(?:\^?[23]|[²³])?)(?![A-Za-z])"
)
# `is`, with a value right behind it that is the end of what is said, and a clause that comes before it.
_IS = re.compile(
    r"(?:(?<=[$)\]]) ?=|(?<![A-Za-z])(?:is|are|equals|(?:must|should|would|will) be)):? (?:exactly |therefore )?"
    r"(?=[-\u2212$.(]*[\d\u221a]|\$|\\[(\[])(?![^.\n]*\b(?:from|than|times|away|apart)\b)"
)
_GIVEN = re.compile(r"(?:if|when|for|where|with|given|since|let)\b", re.I)
_NUMERIC = re.compile(r"[\d\u221a\u03c0\u221e]|sqrt")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[\u4e00-\u9fff]")
# Between two formulas that are parts of one answer: `$1$, $2$ and $3$`.
_JOINT = re.compile(r"\s*(?:[,;]\s*(?:(?:and|or)\b\s*)?|(?:and|or)\b\s*)", re.IGNORECASE)


def sentence(text: str, start: int, bolds: list[tuple[int, int]]) -> tuple[str | None, int]:
    """Return the answer that begins at `start`, and where it ends: formulas, a number, or the words of a sentence."""
    filler = _FILLER.match(text, start)
    start = filler.end() if filler else start
    stop = start + 2 * MAX_ANSWER
    end = _END.search(text, start, stop)
    line = text[start : end.start() if end else stop].strip()
    until = start + len(line)
    formula = _MATH.search(text, start, stop)
    number = _PLAIN.match(text, start, stop)
    number = number if number and _NUMERIC.search(number[0]) else None
    if formula and not number and (stated := _stated(text, start, formula, until)):
        return sentence(text, stated, bolds)
    if formula and formula.start() == start:
        return _joined(text, formula) or line, formula.end()
    prose = len(_WORDS.findall(line))
    if number:
        return ((prose or number.end() >= until) and _complete(text, number)) or line, number.end()
    if formula and formula.start() <= until:
        return _joined(text, formula) or line, formula.end()
    return (prose > 1 and last(text, bolds, start, until)) or line, until


def _stated(text: str, start: int, formula: "re.Match[str]", until: int) -> int | None:
    """Return where the value of `the largest $n$ is 34` begins; None if the first formula is the value."""
    said = [each for each in _IS.finditer(text, start, until) if text.count("$", start, each.start()) % 2 == 0]
    if not said or (formula.start() == start and text[formula.end() : said[0].start()] not in {"", " ", ", which "}):
        return None
    return said[-1 if _GIVEN.match(text, start) else 0].end()


def last(text: str, bolds: list[tuple[int, int]], start: int, end: int) -> str | None:
    """Return what is in bold in the last sentence with an answer, else the last number there, else the last formula."""
    formulas: list[re.Match[str]] = []
    for formula in _MATH.finditer(text, start, end):
        if formulas and not _JOINT.fullmatch(text, formulas[-1].end(), formula.start()):
            formulas = []
        formulas.append(formula)
    after = formulas[-1].end() if formulas else start
    numbers = [
        number
        for number in _PLAIN.finditer(text, after, end)
        if _NUMERIC.search(number[0]) and not _ITEM.match(text, number.start())
    ]
    while len(numbers) > 1 or (numbers and formulas):  # a value beside the point follows another
        before, at = numbers[-2].end() if len(numbers) > 1 else after, numbers[-1].start()
        aside = "=" not in numbers[-1][0] and _ASIDE.search(text[max(0, at - 60) : at])
        if not aside or _BREAK.search(text, before, at):
            break
        numbers.pop()
    found, until = (numbers[-1].start(), numbers[-1].end()) if numbers else (after, after)
    for begins, ends in reversed([bold for bold in bolds if start <= bold[0] and bold[1] <= end]):
        content = text[begins:ends]
        if _LABEL.fullmatch(content) or text.startswith(":", ends) or _BULLET.fullmatch(text, begins - 1, ends):
            continue
        if any(beside.search(text[max(0, begins - 60) : begins]) for beside in (_ASIDE, _DENIED)):
            continue
        value = bool(_NUMERIC.search(content) or _MATH.search(content))
        if not _BREAK.search(text, *((ends, found) if found > ends else (until, begins))):
            if value:
                return last(text, [], start, ends if found > ends else end) or (content if " " in content else None)
            if until <= begins and ends - begins < 60:
                return content
        break
    if numbers:
        return None if _COUNTER.search(text[max(0, found - 24) : found]) else _complete(text, numbers[-1])
    return _joined(text, formulas[0]) if formulas else None


def _joined(text: str, formula: "re.Match[str]") -> str | None:
    """Return a formula with its unit, or with those that belong to it; None if the words around it deny it."""
    changed = _CHANGED.match(text, formula.end()) or _COMES_FROM.search(
        text, max(0, formula.start() - 24), formula.start()
    )
    if changed or denied(text, formula.start(), formula.end()):
        return None
    parts = [inside(formula)]
    while following := _MATH.search(text, formula.end()):
        between = text[formula.end() : following.start()]
        if len(between) > 20 or not _JOINT.fullmatch(between):
            break
        parts.append(inside(following))
        formula = following
    return ", ".join(parts) if len(parts) > 1 else _with_measure(text, parts[0], formula.end())


def _complete(text: str, number: "re.Match[str]") -> str | None:
    """Return the number or formula if nothing beside it changes it, with its unit; of `9 * 2 = 18` the last side."""
    before = text[max(0, number.start() - 60) : number.start()]
    value, (*sums, last) = number[0], re.split(r"(?<![<>!])=", number[0])
    letters = re.search(r"(?!x\d|and|or|et|y)(?<![A-Za-z])[A-Za-z]", value)
    if sums and (not letters or (len(sums) > 1 and not number[1])):
        value = last.strip()
    elif _COMES_FROM.search(before) or _DENIED.search(before) or text.startswith(" if ", number.end()):
        return None
    if any(changes.match(text, number.end()) for changes in (_REFUSED, _CONTINUES)) or re.fullmatch(
        r"\d+[-\u2013]\d+", value
    ):
        return None
    return _with_measure(text, value, number.end())


def _with_measure(text: str, value: str, end: int) -> str:
    """Return the value with the unit after it, if that is a measure, which may differ from the gold answer's."""
    measure = _MEASURE.match(text, end)
    if not measure:
        return value
    forms = [f"{value} {measure[1] or measure[0]}", rf"{value}\text{{ {measure[1]}}}"]  # `5 m` alone is a product
    return next((form for form in forms if without_unit(tidy(form))[1]), value)


def denied(text: str, start: int, end: int) -> bool:
    """Return whether the words before or behind a value say that it is not the answer."""
    return bool(_DENIED.search(text[max(0, start - 60) : start]) or _REFUSED.match(text, end))


def inside(formula: "re.Match[str]") -> str:
    """Return the formula without its dollar signs: the group that matched."""
    return next(group for group in formula.groups() if group is not None)

"""One spelling for the many of LaTeX and signs outside ASCII, and the parts of an answer: lists, brackets, words."""
# ruff: noqa: RUF001  (look-alikes are what its first part is about)

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

_SIGNS = {
    sign: latex + " " * latex[-1].isalpha()
    for signs, latex in (
        line.rsplit(maxsplit=1)
        for line in r"""
        −–—‐‑ -; × \times; ÷ \div; ·⋅∙• \cdot; ± \pm; ∓ \mp; ≤⩽≦ \le; ≥⩾≧ \ge; ≠ \ne; ≈ \approx; ≡ \equiv
        ∈ \in; ∉ \notin; ∪ \cup; ∩ \cap; ∖ \setminus; ∅⌀ \emptyset; ∞ \infty; ∧ \land; ∨ \lor
        ⇒⟹ \Rightarrow; → \to; ∣ |; ∠ \angle; △ \triangle; ∑ \sum; ∏ \prod; ∫ \int; √ \sqrt; ∛ \sqrt[3]
        ∜ \sqrt[4]; ⌊ \lfloor; ⌋ \rfloor; ⌈ \lceil; ⌉ \rceil; ⟨〈 \langle; ⟩〉 \rangle; ℝ \mathbb{R}
        ℤ \mathbb{Z}; ℕ \mathbb{N}; ℚ \mathbb{Q}; ℂ \mathbb{C}; ° ^\circ; ′’‘ '; ″“” "; ⁄∕ /; ∶ :; 、 ,; 。 .
        """.replace(";", "\n").splitlines()
        if line.strip()
    )
    for sign in signs.strip()
} | {"\u2009": r"\,", "\u202f": r"\,", "\u200a": r"\,", "\u200b": "", "\u2060": "", "\ufeff": ""}
_WORDS = {"或者": " or ", "或": " or ", "以及": " and "} | dict.fromkeys("和与及且", " and ")


def latex_of(text: str) -> str:
    """Return the text with LaTeX in place of signs such as `≤`, `√`, `½` and `²`, wide or Greek letters, and 或."""
    if text.isascii():
        return text
    for word, english in _WORDS.items():
        text = text.replace(word, english)
    return re.sub(r"\0\}([\^_])\{\0", "", "".join(map(_latex, text))).replace("\0", "")


@lru_cache(maxsize=4096)
def _latex(sign: str) -> str:
    if sign.isascii() or sign in _SIGNS:
        return _SIGNS.get(sign, sign)
    if letter := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(sign, "")):
        name = letter[2].replace("LAMDA", "LAMBDA").lower()
        return f"\\{name if letter[1] == 'SMALL' else name.title()} "
    plain = unicodedata.normalize("NFKC", sign)
    if plain == sign:
        return sign
    kind, inner = unicodedata.decomposition(sign).split()[0], "".join(map(_latex, plain))
    if kind == "<fraction>":
        return re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", inner)
    # NUL marks where runs of small digits join.
    return {"<super>": f"^{{\0{inner}\0}}", "<sub>": f"_{{\0{inner}\0}}"}.get(kind, inner)


T = TypeVar("T")


def rewriting(*rules: tuple[str, str], flags: int = 0) -> Callable[[str], str]:
    """Return a function that puts replacements in the place of patterns, one after the other."""
    compiled = [(re.compile(pattern, flags), replacement) for pattern, replacement in rules]

    def rewrite(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return rewrite


_FUNCTIONS = "(?:arc|a)?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|ln|log|max|min|gcd"
_PRICE = r"(-?\d(?:(?:[\d.,]|\{,\})*\d)?)(?=\s*(?:\.?$|\\text)|\s[a-z]{2})"
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|omega|sigma|varphi|phi"
_COMMANDS = r"""
[dtc](frac|binom) \\\1; degrees? ^\\circ; lbrace \\{; rbrace \\}; l(?:angle|paren) (; r(?:angle|paren) ); lbrack [
; rbrack ]; [lr]?vert |; colon :; lt <; gt >; R \\mathbb{R}; (?:dots[cbmio]?|cdots) \\ldots
"""
_one_spelling = rewriting(
    # JSON within JSON
    (r"(?<!\\)\\\\(?=(?:left|right|[dt]?frac|sqrt|text|math|begin|end|pi|infty|cup|cdot|times|[lg]eq?)|[{}])", r"\\"),
    (r"^\s*(['\"`])(.*)\1\s*$", r"\2"),
    # lines
    (r"\\\\\[[^\]]{0,9}\]|\\cr(?![A-Za-z])", r"\\\\"),
    (r"(?:\\left\s*)?\\\{\s*\\begin\{(aligned|gathered|array)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}"
     r"(?:\s*\\right\s*\.)?", r"\\begin{cases}\2\\end{cases}"),
    (r"\\(begin|end)\{(?:array|smallmatrix)\}(?:\{[lcr| ]*\})?", r"\\\1{matrix}"),
    (r"\\(?:begin|end)\{(?:align(?:ed|at)?|gather(?:ed)?|equation|split|math|displaymath|center)\*?\}", " "),
    # what changes the looks alone
    (r"\\(?:text)?color(?:\[[^\]{}]*\])?\s*\{[^{}]*\}|\\fcolorbox\{[^{}]*\}\{[^{}]*\}|\\colorbox\{[^{}]*\}", ""),
    (r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|hline|nonumber|boxed"
     r"|fbox|underline|bm|boldsymbol|pmb|large|Large|small|normalsize|rm|bf|it|bold)(?![A-Za-z])", " "),
    (r"\\!\s*", ""),  # before the spaces: `20,\! 160` is one number
    (r"(?<=\d)(?:\\[,; ]|\{ \}|\{\\,\}|~)(?=\d{3}(?!\d))", ""),
    # a price alone: the sign is a unit; elsewhere it is left out
    *(
        (rf"^\s*([-+]?)\s*{sign}\s*{_PRICE}(?=[^$]*$)", rf"\1\2\\text{{ {name}}}")
        for sign, name in (
            (r"(?:US)?\\?[$]", "dollars"),
            ("\u20ac", "euros"),
            ("\u00a3", "pounds"),
            ("[\u00a5\uffe5]", "yuan"),
        )
    ),
    (r"(?<=\d)\s*\u20ac$", r"\\text{ euros}"),
    (r"\\?[$]|\u20ac|\u00a3", " "),
    (r"(?<!\\)\\(?:[,;: ()\[\]]|q?quad(?![A-Za-z]))|~", " "),
    (r"\\(?:mbox|text(?:bf|it|rm|normal|tt|sf)?|math(?:rm|bf|it|sf|tt)|operatorname)(?![A-Za-z])\*?\s*", r"\\text"),
    (rf"\\text\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1"),
    (r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ"),
    *((rf"\\{name}(?![A-Za-z])", sign) for name, sign in map(str.split, _COMMANDS.split(";"))),
    (r"(?<=\d)(?:\\text)?\{([:.;,])\}|(?<![\w\\}_^\]])\{([^{}\\]*)\}", r"\1\2"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\choose(?![A-Za-z])([^{}]*)$", r"\\binom{\1\3}{\2\4}"),
    (r"\\(frac|binom)\s*(?:\{([^{}]*)\}|(\w|\\pi))\s*(?:\{([^{}]*)\}|(\w|\\pi))", r"\\\1{\2\3}{\4\5}"),
    *(
        (rf"_\s*\{{?\s*(?:\\text\s*\{{)?\s*{word}\s*\}}?\}}?$", f"_{base}")
        for base, word in enumerate(("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 2)
    ),
    # relations and sets
    (r"[:=]=", "="),
    (r"<=|=<|\\l(?:eq|eqslant|eqq)(?![A-Za-z])", r"\\le "),
    (r">=|\\g(?:eq|eqslant|eqq)(?![A-Za-z])", r"\\ge "),
    (r"!=|/=|\\neq(?![A-Za-z])|\\not\s*=|\\not\{=\}", r"\\ne "),
    (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
    (r"\\(?:smallsetminus|backslash)(?![A-Za-z])|-(?=\s*\\\{)", r"\\setminus "),
    (r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:mathbb|Bbb|mathds)\s*(?:\{\s*([RZNQC])\s*\}|([RZNQC]))", r"\\mathbb{\1\2}"),
    (r"\\in\s*(?:\\text\{([RZNQ])\}|([RZNQ])(?!\w))", r"\\in \\mathbb{\1\2}"),
    # between conditions alone: of statements, `p \lor q` is no list
    (r"\\(?:lor|vee)(?![A-Za-z])(?=.*(?:[<>=]|\\[lg]e))", r"\\text{ or }"),
    (r"\\(?:land|wedge)(?![A-Za-z])(?=.*(?:[<>=]|\\[lg]e))", r"\\text{ and }"),
    (r"(^|[\[(,;=<>]|\\(?:le|ge|ne)(?![A-Za-z]))\s*\+(?=\s*[\w.\\])", r"\1 "),
    (r"^\s*(?:=|\\(?:therefore|Rightarrow|implies|approx)(?![A-Za-z]))(?!=)", ""),
    (r"^\\text\{[^{}]*(?::|\b(?:is|are|equals|interval))\s*\}\s*(?=\S)"
     r"|^[Tt]he answer is |^(?!\w+ [A-J]:)[A-Za-z][A-Za-z ]{2,30}: (?=\S)", ""),
    (r"\.\.\.+|\u2026", r"\\ldots "),
    (r"^(?:\\text\{)?\s*all real(?:s| numbers?)(?: x)?,? (?:except|other than|but)(?: for)?\s*\}?(?: x ?=)?(.+)",
     r"\\mathbb{R} \\setminus \\{\1\\}"),
    (r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":"),
    (r"(?<![A-Za-z\\])abs\s*\(([^()]*)\)", r"|\1|"),
    (r"(?<![A-Za-z\\_])C\s*(?:\((\d+), ?(\d+)\)|_\{?(\d+)\}?\^\{?(\d+)\}?)", r"\\binom{\1\3}{\2\4}"),
    (r"(?<=[\d}])\s*([\u4e00-\u9fff]{1,6})$", r"\\text{\1}"),
    (r"\*\*", "^"),
    (r"\^\s*-\s*(\w+)", r"^{-\1}"),
    # Greek and functions that programs write without a backslash, numpy's among them
    (r"\bnp\.", ""),
    (r"(?<![A-Za-z])\\?sqrt\s*(\[\d\])?(?:\s*\(([^()]*)\)|\s+(\d+))", r"\\sqrt\1{\2\3}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|infty|sqrt|{_GREEK})(?![A-Za-z])", r"\\\1"),
    (r"\\a(sin|cos|tan)(?![A-Za-z])", r"\\arc\1"),
    (r"\s+", " "),
)  # fmt: skip
_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_FRENCH = re.compile(r"([\[\]])([^\[\]]+?[,;][^\[\]]+?)([\[\]])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|notin|setminus|cap|cup|emptyset|mathbb)(?![A-Za-z])")
_BUILDER = re.compile(r"\\\{\s*[A-Za-z](?:_\{?\w+\}?)?\s*(?:\||:|\\mid(?![A-Za-z])|\\in(?![A-Za-z]))")
_PHRASES = {
    r"(?:[a-z] (?:is|can be) )?(?:the set of )?(?:all|any)(?: the)? real(?:s| numbers?| values of)?(?: [a-z])?":
        r"\mathbb{R}",
    r"(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?|\u7a7a\u96c6|\u65e0\u89e3":
        r"\emptyset",
    r"(?:the set of )?(?:all|any)(?: the)? integers?": r"\mathbb{Z}",
    r"(?:positive )?infinity": r"\infty",
    r"(?:negative |minus |-)infinity": r"-\infty",
}  # fmt: skip
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])")
AND = re.compile(r"\\text\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    """Return the text with one spelling for fractions, spaces, delimiters and functions, where there are many."""
    text = _one_spelling(latex_of(text)).strip().rstrip(".,;:").strip()
    while wrapped := _wrapping(text):
        text = text[wrapped:-1].strip().rstrip(".")
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=\s|[a-z]\s*=)", ", ", text.replace("&", ""))  # lines
    if _SPACED.fullmatch(text):
        return text.replace(" ", "")
    level = list(levels(text)) or [0]
    if min(level) < 0 or level[-1]:  # `]2,5[`
        text = _FRENCH.sub(lambda m: ("[" if m[1] == "[" else "(") + m[2] + ("]" if m[3] == "]" else ")"), text)
    plain = unworded(text).strip(" .").casefold()
    return next((latex for phrase, latex in _PHRASES.items() if re.fullmatch(phrase, plain)), text)


def _wrapping(text: str) -> int:
    r"""Return the length of what opens around the whole text: `{`, or `\text{` (`\textbf{`) around digits; else 0."""
    if text.startswith("{") and closes(text) == len(text) - 1:
        return 1
    opening = len(r"\text{")
    around = text.startswith(r"\text{") and closes(text[opening - 1 :]) == len(text) - opening
    return opening if around and re.search(r"\d", text[opening:-1]) else 0


@lru_cache(maxsize=4096)
def key(text: str) -> str:
    r"""Return a text that is the same for tidy texts that differ only in spaces, needless braces and \text{}."""
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\0", _TEXT.sub(r"\1", text))
    text = re.sub(r"(?<=\d) (?=\d)", "\0", text)
    text = text.replace(" ", "").replace("\0", " ")
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


def closes(text: str) -> int:
    """Return where the bracket that opens `text` is closed, whatever its kind; -1 if nowhere."""
    return next((place for place, level in enumerate(levels(text)) if level == 0), -1)


def levels(text: str) -> Iterator[int]:
    """Yield how many brackets are open after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)


def top(text: str) -> str:
    """Return the text with NUL in place of all that stands within brackets."""
    return "".join("\0" if level else character for character, level in zip(text, levels(text), strict=True))


def relational(text: str) -> bool:
    r"""Return whether a text is a condition or a set of numbers, such as `x < 2`, `\{x : x < 2\}` or `\mathbb{R}`."""
    return r"\begin" not in text and bool(_RELATION.search(top(text)) or _BUILDER.match(text))


def split_top(text: str, separator: str, *, thousands: bool = False) -> list[str]:
    """Return the parts between separators outside all brackets; with `thousands`, `1,234` is one number there."""
    parts, start, place, level = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        number = None
        if thousands and level == 0 and character.isdigit() and (place == 0 or text[place - 1] not in "0123456789.,"):
            number = _THOUSANDS.match(text, place)
        if number:
            place = number.end()
            continue
        level += (character in "([{") - (character in ")]}")
        if level == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            place = start = place + len(separator)
            continue
        place += 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def listed(text: str, *, thousands: bool) -> list[str]:
    r"""Return the items of `1, 2 and 3`, with `a \pm b` as two items; one item if it is no list."""
    text = AND.sub(",", text).replace(";", ",")
    items = []
    for item in split_top(text, ",", thousands=thousands):
        # In `(1 \pm 2, 3)` the sign belongs to an item of that group.
        grouped = item.startswith(("(", "[", r"\{")) and closes(item.removeprefix("\\")) >= len(item) - 2
        signs = ("+", "-") if item.count(r"\pm") == 1 and not grouped else ("",)
        items += [item.replace(r"\pm", sign) if sign else item for sign in signs]
    return [item.strip().removeprefix("+").strip() for item in items]


def in_any_order(golds: Sequence[T], answers: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Return whether the answers are the golds in any order; equality is transitive, so the first match will do."""
    if len(golds) != len(answers):
        return False
    left = list(answers)
    for gold in golds:
        place = next((place for place, answer in enumerate(left) if same(gold, answer)), None)
        if place is None:
            return False
        del left[place]
    return True


def unworded(text: str) -> str:
    r"""Return the text with the words of \text{} as they are, and one space where there are some."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())

"""Numbers as they are written in answers, read exactly, and what stands around one: units, and words.

Some words change its value, others do not.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from oblrpo.tasks.grading.normal import rewriting

# More digits than any answer has; they bound the cost of hostile text.
MAX_DIGITS = 400
MAX_EXPONENT = 2_000
# math-verify compares decimals at 6 places. Here these are at most 6 digits too, or 1e-9 would equal 2e-9.
TOLERANCE = Fraction(5, 10**7)
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_TEN = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4})))"
_DECIMAL = re.compile(rf"({_PLAIN})(?:[eE]([-+]?\d{{1,4}})|{_TEN})?", re.ASCII)
_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*(-?)\s*({_PLAIN})\s*\}}\s*\{{\s*(-?)\s*({_PLAIN})\s*\}}|()({_PLAIN})\s*/\s*()({_PLAIN})", re.ASCII
)
_MIXED = re.compile(r"(\d+)(?: (\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})", re.ASCII)
_PERCENT = re.compile(r"\s*\\?%$|\s*(?:\\text\{\s*)?(?:percent(?:age)?|per cent|pct)(?:\s*\})?$")
# A decimal whose last digits go on: under a line or dots, in brackets, or twice before \ldots.
_REPEATING = re.compile(
    r"(\d*)\.(\d*?)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\)"
    r"|\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|(\d{1,9}?)\9+\s*\\ldots)",
    re.ASCII,
)


@dataclass(frozen=True)
class Number:
    """A rational number, with whether it was written as a decimal, and whether a percent sign followed."""

    value: Fraction
    decimal: bool
    percent: bool


@lru_cache(maxsize=4096)
def number(text: str) -> Number | None:
    r"""Return the number that a tidy text is: `-1,234.5`, `4e21`, `\frac{1}{2}`, `1 1/2`, `8\%`, `0.\overline{3}`."""
    if len(text) > MAX_DIGITS:
        return None
    body = _PERCENT.sub("", text)
    percent = body != text
    sign = -1 if body.startswith("-") else 1
    body = body[1:].strip() if body[:1] in {"-", "+"} else body.strip()
    try:
        value = _value(body)
    except (ZeroDivisionError, ValueError):
        return None
    decimal = bool(re.search(r"\.|\d[eE]|10\s*\^", body)) and not _REPEATING.fullmatch(body)
    return None if value is None else Number(sign * value, decimal, percent)


def _value(body: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(body):
        exponent = int(match[2] or match[3] or match[4] or 0)
        return _plain(match[1]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if match := _FRACTION.fullmatch(body):
        minus, top, other, bottom = match.groups()[:4] if match[2] else match.groups()[4:]
        return (-1 if minus != other else 1) * _plain(top) / _plain(bottom)
    if match := _MIXED.fullmatch(body):
        units, top, bottom = map(int, filter(None, match.groups()))
        return units + Fraction(top, bottom) if top < bottom else None
    if match := _REPEATING.fullmatch(re.sub(r"\s*\\ldots$", r"\\ldots", body)):
        integer, first, *period = match.groups("")
        digits = "".join(period)
        nines = 10 ** len(digits) - 1
        return Fraction(int(integer + first + digits) - int("0" + integer + first), nines * 10 ** len(first))
    return None


def _plain(text: str) -> Fraction:
    return Fraction("0" + text.replace(",", "").rstrip("."))


def tolerance(gold: Fraction) -> Fraction:
    """Return half a unit of the sixth decimal place; for a gold answer below 0.1, of its sixth digit."""
    scale = Fraction(1)
    while scale / 10 > abs(gold) > 0:
        scale /= 10
    return TOLERANCE * scale if gold else Fraction(0)


def same_number(gold: Number, answer: Number) -> bool:
    """Return whether two numbers are equal: p% is p/100, and also p where the other states no percent sign.

    A gold of p accepts an answer of p% only above 1: `0.5%` is not what a gold of 0.5 means.
    """

    def close(wanted: Fraction, given: Fraction) -> bool:
        return wanted == given or (gold.decimal and abs(wanted - given) <= tolerance(wanted))

    as_written = close(gold.value, answer.value)
    if gold.percent == answer.percent:
        return as_written
    wanted, given = (number.value / 100 if number.percent else number.value for number in (gold, answer))
    return close(wanted, given) or (as_written and (gold.percent or abs(answer.value) > 1))


def _sizes(table: str) -> dict[str, Fraction]:
    return {name: Fraction(size) for row in table.split("|") for *names, size in [row.split()] for name in names}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Symbol, size in units named before it, names. Those before `~` also have milli-, kilo- and the like.
_TABLE = """
m 1 m metre meter 米 | g 1 g gram gramme 克 | s 1 s second sec 秒 | L 1/1000 m^3 l liter litre 升 | A 1 A ampere amp
| J 1000 g*m^2/s^2 joule | N 1000 g*m/s^2 newton | W 1000 g*m^2/s^3 watt | Pa 1000 g/m/s^2 pascal | Hz 1 s^-1 hertz
| V 1000 g*m^2/A/s^3 volt | Ω 1 V/A ohm | C 1 A*s coulomb | F 1 C/V farad | T 1 T tesla | eV 1 eV | K 1 K kelvin
| mol 1 mol mole
~
in 127/5000 m inch inche | ft 12 in foot feet | yd 3 ft yard | mi 5280 ft mile | 公里 1000 m | ha 10000 m^2 hectare
| min 60 s minute 分 分钟 | h 60 min hour hr 小时 时 | d 24 h day 天 日 | wk 7 d week 周 | mo 1 mo month 月
| yr 12 mo year 年 岁 | lb 1 lb lbs pound GBP | oz 1/16 lb ounce | ton 1 ton tonne 吨 | 公斤 1000 g | 斤 500 g
| mph 1 mi/h | kph 1000 m/h kmh | gal 1 gal gallon | dollar 1 dollar USD buck 美元 | cent 1/100 dollar | euro 1 euro EUR
| yuan 1 yuan RMB 元 | 角 1/10 yuan | Rs 1 Rs rupee | unit 1 unit | deg 1 deg degree 度 | rad 1 rad radian
| celsius 1 celsius 摄氏度 | fahrenheit 1 fahrenheit
"""
_PREFIXES = {"": Fraction(1)} | _sizes(
    "n nano 1e-9 | \u00b5 \u03bc micro 1e-6 | m milli 毫 1e-3 | c centi 厘 1e-2 | d deci 分 1e-1 | k kilo 千 1e3"
    "| M mega 1e6 | G giga 1e9"
)
# Words after a number that multiply it, and words that change it in another way.
_PARTS = _sizes(
    "third 1/3 | fourth 1/4 | fifth 1/5 | sixth 1/6 | seventh 1/7 | eighth 1/8 | ninth 1/9 | tenth 1/10 | twelfth 1/12"
    "| sixteenth 1/16 | twentieth 1/20 | hundredth 1/100 | thousandth 1e-3 | millionth 1e-6 | billionth 1e-9"
)
_FACTORS = _PARTS | _sizes(
    "hundred 百 100 | thousand 千 1e3 | 万 1e4 | million 1e6 | 亿 1e8 | billion 1e9 | trillion 1e12 | quadrillion 1e15"
    "| dozen 12 | half halve 1/2 | quarter 1/4 | belowzero -1"
)
_CHANGED = {"squared": "({})^{{2}}", "cubed": "({})^{{3}}", "factorial": "({})!"}
_CARDINALS = _sizes(
    "zero 0 | one 1 | two 2 | three 3 | four 4 | five 5 | six 6 | seven 7 | eight 8 | nine 9 | ten 10 | eleven 11"
    "| twelve 12 | thirteen 13 | fourteen 14 | fifteen 15 | sixteen 16 | seventeen 17 | eighteen 18 | nineteen 19"
    "| twenty 20 | thirty 30 | forty 40 | fifty 50 | sixty 60 | seventy 70 | eighty 80 | ninety 90"
)
_LARGEST = 10**20
# Words that make of a number another one, or another statement: not units. Words that say nothing.
_NOT_UNITS = _CARDINALS.keys() | _names(
    """
    percent percentage and or nor to if for when where with mod modulo not no more less fewer greater smaller larger
    bigger higher lower longer shorter older younger than least most minus plus times over is are was equal equals
    approximately about undefined base below above under negative positive double doubled triple tripled twice thrice
    fold halved infinity divided multiplied through between except without choose power powers root inverse reciprocal
    opposite remainder short score gross light nautical
    """
)
_NUMERAL = re.compile(r".*(?:teen|tie)ths?|.*illions?|.*illionths?|.*[倍成多余半折].*|.*分之.*|以[上下]")
_FILLERS = _names("of in the a an total left on at all whole each every per")
_PER = {"/", "per", "a", "an", "each", "every"}
# Without \text, `2 xy`, `2 mg` and `2 sin x` are products; these are not, nor are words, nor `2 m/s`.
_BARE = _names("cm mm km kg ft in yd mi lb oz hr mL ml Hz kHz MHz eV kW kJ kPa kN st nd rd th")
_WORD = re.compile(r"(?=.*[aeiouy])[A-Za-z][a-z]{3,}|[^\x00-\x7f]+")
_LEAD = re.compile(
    r"(?:\\text\{\s*)?(exactly|about|approximately|around|roughly|only|just|(?:a )?total of|Rs\.?|negative|minus)"
    r"(?![A-Za-z])\s*\}?\s*",
    re.IGNORECASE,
)
_SPELLED = re.compile(
    rf"(?:(?:{'|'.join([*_CARDINALS, 'hundred', 'thousand'])})(?![a-z])(?:[- ]|$)(?:and )?)+", re.IGNORECASE
)
_HEAD = re.compile(
    r"[-+]?\s*(?:[\d.,/ ]*\d\.?(?:[eE]-?\d+)?)?(?:\\frac\s*(?:\d\s*\d|\{[^{}]*\}\s*\{[^{}]*\}))?"
    r"(?:\s*(?:\\times|\\cdot)\s*10\^\{?-?\d+\}?)?(?:\s*\\pi)?"
)
_MARK = re.compile(r"(?<![_^{ ])\s*(?:\\text\{|\\frac\{\\text|\^\\circ|\\Omega|\\mu\s*\\text|\\in$)")
_PHRASE = re.compile(r"(?=.*[^\W\d_])(?:[^\W\d_]|[-/().,\s]|(?<=[a-z])'|\^ ?-?\d|(?<=[a-z])[23](?!\d))*")
_flat = rewriting(
    (r"\^\\circ\s*(?:\\text\{\s*)?([CF])(?![A-Za-z])", r" degree \1"),
    (r"\^\\circ", " degree "),
    (r"\\frac\{(?:\\text)?\{?([^{}]*)\}?\}\{(?:\\text)?\{?([^{}]*)\}?\}", r" \1/\2 "),
    (r"\\mu\s*(?:\\text)?\{?", "μ"),
    (r"\\Omega", "Ω"),
    (r"\\(min|in)(?![A-Za-z])", r" \1"),  # as the tidy text has it
    (r"\\(?:text|cdot|times)(?![A-Za-z])|[*·]", " "),
    (r"[{}]", ""),
    (r"degrees? (?:C(?![A-Za-z])|[Cc]elsius)", "celsius"),
    (r"degrees? (?:F(?![A-Za-z])|[Ff]ahrenheit)", "fahrenheit"),
    (r"(?<=[a-z]) squared", "^2"),
    (r"(?<=[a-z]) cubed", "^3"),
    (r"below zero", "belowzero"),
    (r"平方", " square "),
    (r"立方", " cubic "),
    (r"每", "/"),
    (r"([百千万亿])(?![米克瓦升])", r" \1 "),
)


class Unit(NamedTuple):
    """Powers of base units, the size of their product, and words that are no known unit; false without known units."""

    size: Fraction = Fraction(1)
    powers: tuple[tuple[str, int], ...] = ()
    words: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.powers)


_UNITS: dict[str, Unit] = {}


def without_unit(text: str) -> tuple[str, Unit]:
    r"""Return the value of `3 \text{ million dollars}`, 3000000, and its unit; words that say nothing are left out."""
    inner = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    text, sign = (inner[1] if inner else text).strip(), ""
    while lead := _LEAD.match(text):
        text, sign = text[lead.end() :], "-" if lead[1].lower() in {"negative", "minus"} else sign
    if spelled := _SPELLED.match(text):
        text = f"{_cardinal(spelled[0])} {text[spelled.end() :]}".strip()
    if sign:
        text = f"-{text}" if number(text) else f"-({text})"
    head, mark = _HEAD.match(text), _MARK.search(text)
    for start in {head.end() if head else 0: None, mark.start() if mark else 0: None}:
        value, tail = text[:start].strip(), text[start:]
        phrase = _phrase(tail, bare="\\" not in tail) if value and not re.search(r"[-+*/=^_(,\\]$", value) else None
        if not phrase:
            continue
        factor, form, unit = phrase
        # Behind a formula there must be a unit; the degrees of \sin 30^\circ belong to the 30.
        function = ("deg", 1) in unit.powers and re.search(r"\\(?!frac)[a-z]{3}", value)
        if function or not (unit or re.search(r"(?:[\d})!%]|\\pi)$", value)):
            continue
        exact = number(value) if factor != 1 else None
        if factor != 1:
            value = str(exact.value * factor) if exact else rf"({value}) \cdot ({factor})"
        return form.format(value), unit
    return text, Unit()


def ratio(gold: Unit, answer: Unit) -> Fraction | None:
    """Return how many of the gold's units the answer's unit is: 1 if one of them is missing, None if they differ."""
    kinds = {gold.powers, answer.powers}
    if gold and answer:
        if (("deg", 1),) in kinds and kinds & {(("celsius", 1),), (("fahrenheit", 1),)}:  # degrees of what is not said
            return Fraction(1)
        return answer.size / gold.size if len(kinds) == 1 else None
    named = all(unit.powers or unit.words for unit in (gold, answer))
    return Fraction(1) if not named or gold.words & answer.words else None


def _phrase(text: str, *, bare: bool) -> tuple[Fraction, str, Unit] | None:
    """Return the factor, the form and the unit of the words after a number; None if these are no unit."""
    text = _flat(text)
    if not _PHRASE.fullmatch(text):
        return None
    factor, form, sign, power = Fraction(1), "{}", 1, 1
    units: list[tuple[Unit, int]] = []
    words: list[str] = []
    for place, (token, following) in enumerate(pairwise([*re.findall(r"[^\W\d_]+|\^ ?-?\d|[/23]", text), ""])):
        word = token.lower()
        one, unit, more = word.removesuffix("s"), _known(token), following[:1].isalpha()
        ordinal = word in _PARTS and more and following != "of"  # 20 fifth graders
        if token in _PER and units:
            sign = -1
        elif token in {"/", "per"}:  # eggs per day
            break
        elif word in {"square", "sq", "cubic", "cu"}:
            power = 2 if word[0] == "s" else 3
        elif place and token[0] in "^23":
            units[-1:] = [(part, n * int(token.strip("^ "))) for part, n in units[-1:]]
        elif one in _CHANGED:
            form = _CHANGED[one]
        elif one in _FACTORS and not ordinal:
            factor *= _FACTORS[one]
        elif unit and not (token == "in" and more):
            letters = bare and token.isascii() and len(token) < 3 and token not in _BARE
            if letters and not ("/" in text and text[0] == " "):
                return None
            units, power = [*units, (unit, sign * power)], 1
        elif (
            token[0] in "^23"
            or word in _NOT_UNITS
            or one in _CARDINALS
            or _NUMERAL.fullmatch(word)
            or (len(token) == 1 and token.isascii() and not (word == "a" and more))
        ):
            return None
        elif one not in _FILLERS:
            if bare and not words and not units and token not in _BARE and not _WORD.fullmatch(token):
                return None
            words.append(one)
        if len(units) > 9 or any(abs(n) > 9 for _, n in units) or not 1 / _LARGEST < abs(factor) < _LARGEST:
            return None
    return factor, form, _product(units, words)


def _product(units: list[tuple[Unit, int]], words: list[str]) -> Unit:
    powers: Counter[str] = Counter()
    size = Fraction(1)
    for part, exponent in units:
        size *= part.size**exponent
        for name, n in part.powers:
            powers[name] += n * exponent
    if powers == {"unit": 1}:  # of length, or of whatever is counted
        powers.clear()
    return Unit(size, tuple(sorted((name, n) for name, n in powers.items() if n)), frozenset(words))


def _known(token: str) -> Unit | None:
    names = (token, token.lower(), token.lower().removesuffix("s"), token.lower().removesuffix("es"))
    return next((_UNITS[name] for name in names if name in _UNITS and (len(name) > 1 or name == token)), None)


def _cardinal(words: str) -> Fraction:
    total, part = Fraction(0), Fraction(0)
    for word in re.findall("[a-z]+", words.lower()):
        if word == "thousand":
            total, part = total + (part or Fraction(1)) * 1000, Fraction(0)
        elif word != "and":
            part = (part or Fraction(1)) * 100 if word == "hundred" else part + _CARDINALS[word]
    return total + part


for section, prefixes in zip(_TABLE.split("~"), (_PREFIXES, {"": Fraction(1)}), strict=True):
    for row in section.split("|"):
        symbol, scale, form, *names = row.split()
        known = _phrase(form, bare=False) if form != symbol else None
        base = known[2] if known else Unit(Fraction(1), ((symbol, 1),))
        for prefix, times in prefixes.items():
            for name in (symbol, *names):
                _UNITS.setdefault(prefix + name, Unit(base.size * Fraction(scale) * times, base.powers))

NAMES = "mg|km/h|" + "|".join(name for name in _UNITS if re.fullmatch(r"[a-z]{3,}", name) or name in _BARE)
"""The names of units that are no product of letters such as kT, as a pattern."""

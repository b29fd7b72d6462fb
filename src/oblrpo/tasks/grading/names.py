r"""Names beside values: `x = 5`, `(k,n) = (45,2)`, `f(x) = 2x`, `n = 3k, k \in \mathbb{Z}`."""

import re

from oblrpo.tasks.grading.normal import closes, key, listed, split_top, unworded

# What may stand before `=` or `\in`: x, a_3, f(x), AB, \angle A, |AB|, S_1:S_2, \frac{AB}{CD}, (x, y).
_NAME = re.compile(
    r"\([A-Za-z]( ?, ?[A-Za-z]){1,3}\)|\|[A-Za-z0-9\\{}_ ']{1,20}\||[A-Za-z]\^\{-1\}\([A-Za-z]\)"
    r"|[A-Za-z\\](?:[A-Za-z0-9\\{}_ ,':/]|\^(?!\{?\d)){0,40}(?:\([A-Za-z0-9\\ ,_{}]{1,20}\))?"
)
_FUNCTION = re.compile(r"([A-Za-z](?:\^\{-1\})?)\(([A-Za-z])\)")
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_IN = re.compile(r"(.*[A-Za-z)}])\s*\\in(?![A-Za-z])\s*(.+)")
_NUMERIC = re.compile(
    r"\\(?:frac|sqrt|cdot|times|div|pi|binom|log|ln|sin|cos|tan|circ)(?![A-Za-z])|[^A-Za-z\\]|\\[^A-Za-z]"
)
# `, where k \in \mathbb{Z}`, `for any integer k` or `(k is an integer)` at the end
_DOMAIN = re.compile(
    r"[ ,;(]*(?:(?:where|with|for(?: any| all| some| every| an)?|\\forall) )?(?:([A-Za-z]) ?\\in ?"
    r"(\\mathbb\{[A-Z]\}[\^_+*>0{}]{0,6})|([A-Za-z]) ?(?:(?:is|are|be) )?(?:any |an )?(?:integers?|\u4e3a\u6574\u6570)"
    r"|(integers?|real numbers?|constants?) ([A-Za-z]))[ .]*\)?$"
)


def named(text: str) -> tuple[str, str]:
    r"""Return the name and the value of `name = value` or `name \in value`, or "" and the text."""
    if r"\begin" not in text and len(listed(text, thousands=True)) > 1:  # the items of a list have names of their own
        return "", text
    if (found := _IN.fullmatch(text)) and _NAME.fullmatch(found[1]):
        return key(found[1]), found[2]
    sides = split_top(text, "=")
    if len(sides) == 2 and numeric(sides[0]):  # 5 = x
        sides.reverse()
    if len(sides) > 1 and _NAME.fullmatch(sides[0]) and not numeric(sides[0]):
        if re.match(r"\\(?:sqrt|frac|log|ln)(?![A-Za-z])", sides[0]) and not several_letters(sides[0]):
            return "", text
        value = " = ".join(sides[1:])
        return key(sides[0]), value[1:-1] if value[0] == "{" and closes(value) == len(value) - 1 else value
    return "", text


def numeric(text: str) -> bool:
    """Return whether a text holds no letter that could be an unknown."""
    return not _NUMERIC.sub("", text)


def several_letters(text: str) -> bool:
    """Return whether a text holds two letters or more that could be unknowns."""
    return len(set(re.findall(r"[A-Za-z](?:_\{?\w+\}?)?", re.sub(r"\\[A-Za-z]+", "", text)))) > 1


def assigned(text: str) -> dict[str, str]:
    """Return the values by name of `k = 45, n = 2`, `(k,n) = (45,2)` or lines of a system; {} for anything else."""
    sides = split_top(text, "=")
    tuples = [side[1:-1] for side in sides if side.startswith("(") and closes(side) == len(side) - 1]
    if len(tuples) == len(sides) == 2:
        names, values = (split_top(side.replace(";", ","), ",") for side in tuples)
        pairs = list(zip(map(key, names), values, strict=True)) if len(names) == len(values) else []
    elif system := _CASES.fullmatch(text):
        pairs = [named(line.replace("&", "").strip(" ,;")) for line in system[1].split(r"\\") if line.strip()]
    else:
        pairs = [named(item) for item in listed(text, thousands=True)]
    return dict(pairs) if len(pairs) == len({name for name, _ in pairs if name}) > 1 else {}


def same_function(gold: str, answer: str, value: str) -> str | None:
    """Return the value with the gold's variable, if both names are of one function (or one is `y`); else None."""
    wanted, given = _FUNCTION.fullmatch(gold), _FUNCTION.fullmatch(answer)
    if (wanted and answer == "y") or (given and gold == "y"):
        return value
    return renamed(value, given[2], wanted[2]) if wanted and given and wanted[1] == given[1] else None


def renamed(text: str, old: str, new: str) -> str | None:
    """Return the text with another letter for a variable; None if that letter stands in it already."""
    letters = re.findall(r"\\[A-Za-z]+|[A-Za-z]", text)
    if old != new and new in letters:
        return None
    return re.sub(r"\\[A-Za-z]+|[A-Za-z]", lambda found: new if found[0] == old else found[0], text)


def without_domains(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Return both without `, k \in \mathbb{Z}` at the end, with the same letter for k; None if the domains differ.

    Of one alone it may say no more than is understood: an integer called k, n or the like, or a real number.
    """
    (gold, letter, domain), (answer, other, other_domain) = _domain(gold), _domain(answer)
    if domain and not other_domain and len(free := _letters(answer)) == 1:
        other, other_domain = free.pop(), domain
    elif other_domain and not domain and len(free := _letters(gold)) == 1:
        letter, domain = free.pop(), other_domain
    if domain and other_domain:
        changed = renamed(answer, other, letter) if domain == other_domain else None
        return None if changed is None else (gold, changed)
    understood = (letter or other) in "jklmnpqrst" or (domain or other_domain) == r"\mathbb{R}"
    return (gold, answer) if understood else None


def _letters(text: str) -> set[str]:
    """Return the unknowns of an answer without its name, such as the k of `x = 2k`."""
    value = named(text)[1]
    return {found for found in re.findall(r"\\[A-Za-z]+|[A-Za-z]", value) if found[0] != "\\"} - {"e", "i"}


def _domain(text: str) -> tuple[str, str, str]:
    found = _DOMAIN.search(unworded(text))
    if not found or not found.start():
        return text, "", ""
    real = found[4] and "integer" not in found[4]
    domain = found[2] or (r"\mathbb{R}" if real else r"\mathbb{Z}")
    return found.string[: found.start()], found[1] or found[3] or found[5], key(domain)

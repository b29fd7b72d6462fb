"""Answers that are no formulas: words, letters of multiple choice, dates and times of day."""

import calendar
import re

from oblrpo.tasks.grading.normal import AND, unworded

# Letters of any script, with spaces, commas, full stops, hyphens and apostrophes between them.
_WORDS = re.compile(r"[^\W\d_]+(?:(?:[ ,.]+|['-])[^\W\d_]+)*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "max", "min", "up", "dne"})
_SAME_WORDS = {"dne": "does not exist", "doesn t exist": "does not exist", "limit does not exist": "does not exist"}
_OPTION = "(?:[Oo]ption|[Cc]hoice|[Aa]nswer)"
_CHOICE = re.compile(
    rf"(?:{_OPTION} )?(?:\(\s*([A-J])\s*\):?|([A-J])(?:\s*[).]|"
    r"\s*:(?=\s*(?:[-\d\\(]|(?:[Aa]n? )?[A-Za-z][a-z]))|$))\s*(.*)"
)
_CHOICES = re.compile(r"[A-J](?:,[A-J])+|(?=[A-J]{2,6}$)A?B?C?D?E?F?G?H?I?J?")
_CLOCK = re.compile(r"(\d{1,2})(?: ?: ?([0-5]\d))?(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?")
_MONTHS = {name.casefold(): n for names in (calendar.month_name, calendar.month_abbr) for n, name in enumerate(names)}


def worded(text: str) -> str | None:
    r"""Return the words of an answer that is only words, such as `\text{odd}` or `east`, in lower case; else None.

    Of "Yes, because ..." it is the yes. A formula such as `xy` is no word, nor is `p - q`.
    """
    plain = re.sub(r"^(?:an?|the) ", "", unworded(text).strip(" .!\"'").casefold())
    if verdict := re.match(r"(yes|no|true|false)[,.;:!] (?!.*\b(?:yes|no|true|false)\b)", plain):
        return verdict[1]
    if not _WORDS.fullmatch(plain):
        return None
    words = re.split(r"[ ,.'-]+", plain)
    if "\\text{" in AND.sub("", text) or any(len(word) > 3 or word in _SHORT_WORDS for word in words):
        names = sorted(" ".join(words).split(" and "))
        return _SAME_WORDS.get(" ".join(words), " and ".join(names))
    return None


def choice(text: str) -> tuple[str, str] | None:
    r"""Return the letter of `A`, `\text{(A)}`, `A) 12` or `(A)\ 12`, and what stands after it; None for no letter."""
    found = _CHOICE.fullmatch(unworded(text))
    return (found[1] or found[2], found[3]) if found and not _CHOICE.fullmatch(found[3]) else None


def choices(text: str) -> list[str] | None:
    r"""Return the letters of `A, C`, `\text{A and C}`, `(A),(C)` or `AC` in order; None for anything else."""
    letters = re.sub(r"[,;]+", ",", re.sub(rf"^{_OPTION}s? |[(){{}}\\ .]", "", AND.sub(",", unworded(text))))
    return sorted(letters.replace(",", "")) if _CHOICES.fullmatch(letters) else None


def moment(text: str) -> tuple[object, ...] | None:
    """Return hour, minute and second of `3:30 p.m.`, or the month and numbers of `20 June`; None for anything else."""
    plain = unworded(text).casefold()
    if (clock := _CLOCK.fullmatch(plain)) and (clock[2] or clock[4]):
        hour, half = int(clock[1]), clock[4]
        return ("time", hour % 12 + 12 * (half == "p") if half else hour, int(clock[2] or 0), int(clock[3] or 0))
    parts = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b", "", plain))
    months = [_MONTHS[part] for part in parts if part in _MONTHS]
    numbers = sorted(int(part) for part in parts if part.isdecimal() and len(part) < 5)
    return ("date", *months, *numbers) if len(months) == 1 and len(parts) == 1 + len(numbers) > 1 else None

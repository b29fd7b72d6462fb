"""Overlap of two texts in words: ROUGE-L (Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", 3.1)."""

import re
from collections.abc import Sequence


def rouge_l(reference: str, text: str) -> float:
    """Return F1 = 2 L / (m + n), L the length of the longest common subsequence of the m and n words.

    Words and figures are those of the package rouge-score without stemming. A longer text raises n and so must earn its
    length; a text without words gives 0.
    """
    wanted, given = words(reference), words(text)
    common = longest_common_subsequence(wanted, given)
    return 2 * common / (len(wanted) + len(given)) if common else 0.0


def words(text: str) -> list[str]:
    """Return the runs of ASCII letters and digits, lower-cased."""
    return re.findall(r"[a-z0-9]+", text.lower())


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by one operation on len(first) bits for each later word.

    Hyyro 2004, "Bit-parallel LCS-length computation revisited": a zero bit marks a row at which the length grows.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    everywhere = (1 << len(first)) - 1
    rows = everywhere
    for word in second:
        matched = rows & places.get(word, 0)
        rows = ((rows + matched) | (rows - matched)) & everywhere
    return len(first) - rows.bit_count()

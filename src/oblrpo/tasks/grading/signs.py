"""Signs outside ASCII as LaTeX."""
# ruff: noqa: RUF001  (look-alikes are what this file is about)

import re
import unicodedata
from functools import lru_cache

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

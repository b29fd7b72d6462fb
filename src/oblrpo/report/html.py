"""Pages from templates. Text of anybody's is escaped, and what would do something unseen is written by number."""

import re
from typing import Any
from unicodedata import category

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from oblrpo.report.episodes import lines_of
from oblrpo.tasks.episode import STOPS

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control characters, marks that turn the direction of what follows or show nothing, halves of surrogate pairs."""
_MEANT = "\u200c\u200d"  # unseen characters that texts need beside lines: what joins letters and emoji


def seen(plain: str) -> str:
    """Return text in which characters that would do something unseen to a page or a console are written by number."""

    def written(match: re.Match[str]) -> str:
        unseen = category(match[0]) in _UNSEEN and match[0] not in _MEANT
        return f"\\u{ord(match[0]):04x}" if unseen else match[0]

    return re.sub(r"[^\t\n\r -~]|\r(?!\n)", written, plain)


TEMPLATES = Environment(
    loader=PackageLoader("oblrpo.report"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else seen(str(value)),
)
"""The templates of pages; `page.html` is the shell of all of them."""
TEMPLATES.globals |= {"FOLDED_FROM": 240, "SHOWN_AT_ENDS": 2000}  # characters; a longer text is folded, and then cut
TEMPLATES.globals |= {"lines_of": lines_of, "STOPS": STOPS}


def render(name: str, **values: Any) -> str:
    """Return a page from the template `name`."""
    return TEMPLATES.get_template(name).render(values)


def markup(form: str, *values: str) -> Markup:
    """Return HTML in which each `{}` of the form is a text."""
    return Markup(form).format(*(value if isinstance(value, Markup) else seen(value) for value in values))


def with_code(text: str) -> Markup:
    """Return a text in which what stands between backticks is code."""
    parts = enumerate(text.split("`"))
    return Markup("").join(markup("<code>{}</code>" if place % 2 else "{}", part) for place, part in parts)

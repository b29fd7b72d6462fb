"""The shell of every page. It suits light and dark screens, laptops and phones, and needs no network and no scripts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from unicodedata import category

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(title: str, body: Iterable[str], reload_seconds: int = 0) -> str:
    """Return a whole page; `body` is HTML, `title` text. A browser reloads it every `reload_seconds`, unless 0."""
    again = f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else ""
    return PAGE.format(title=text(title), again=again, body="\n".join(body))


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Return a table that scrolls by itself on a narrow screen; cells are HTML, the columns `numbers` stand right."""
    right, heads = set(numbers), list(heads)
    kind = [" class=number" if place in right else "" for place in range(len(heads))]
    head = "".join(f"<th{side}>{name}" for side, name in zip(kind, heads, strict=True))
    lines = "".join("<tr>" + "".join(f"<td{side}>{cell}" for side, cell in zip(kind, row, strict=True)) for row in rows)
    return f"<div class=wide><table><tr>{head}{lines}</table></div>"


def charts(drawings: Iterable[str], large: bool = False) -> str:
    """Return charts, if any, side by side, as many as the screen is wide: three on a laptop, or two large ones."""
    kind, drawn = '"charts large"' if large else "charts", "".join(drawings)
    return f"<div class={kind}>{drawn}</div>" if drawn else ""


def facts(values: Mapping[str, tuple[str, str]]) -> str:
    """Return the figures that matter as cards: a name (text), the figure and what stands behind it (HTML)."""
    cards = (
        f"<div><dt>{text(name)}<dd><b>{value}</b><small>{behind}</small></div>"
        for name, (value, behind) in values.items()
    )
    return f"<dl class=facts>{''.join(cards)}</dl>"


_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control characters, marks that turn the direction of what follows or show nothing, halves of surrogate pairs."""
_MEANT = "\u200c\u200d"  # unseen characters that texts need beside lines: what joins letters and emoji


def seen(plain: str) -> str:
    """Return text in which characters that would do something unseen to a page or a console are written by number."""

    def written(match: re.Match[str]) -> str:
        unseen = category(match[0]) in _UNSEEN and match[0] not in _MEANT
        return f"\\u{ord(match[0]):04x}" if unseen else match[0]

    return re.sub(r"[^\t\n\r -~]|\r(?!\n)", written, plain)


def text(plain: str) -> str:
    """Return text as HTML, with what `seen` does."""
    return escape(seen(plain))


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{again}
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2433; --paper: #fff; --line: #d6dae3; --soft: #5c6577; --card: #f5f7fa;
  --alarm: #fdf0e3; --alarm-line: #d9822b; --up: #2c7a44; --down: #b53c46; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #dfe4ee; --paper: #14181f; --line: #39414f; --soft: #9aa4b5;
  --card: #1c222c; --alarm: #33271a; --up: #6cc389; --down: #ee8f96; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem; }}
h1 {{ margin: 0; overflow-wrap: anywhere; }}
p, li, dd, .alarm {{ overflow-wrap: anywhere; }}
h2 {{ margin-top: 2.5rem; }}
h3 {{ margin: .5rem 0; font-size: 1rem; }}
small {{ color: var(--soft); font-size: .85rem; }}
nav {{ font-size: .9rem; line-height: 2; }}
nav a {{ margin-right: 1rem; white-space: nowrap; }}
a {{ color: inherit; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem 1rem; }}
.large {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }}
.charts > * {{ min-width: 0; }}
figure {{ margin: 0; display: flex; flex-direction: column; }}
figcaption {{ padding-bottom: .3rem; line-height: 1.35; flex: 1; }}
figcaption small {{ display: block; }}
figure svg {{ width: 100%; max-width: 36rem; height: auto; color: var(--ink); }}
.facts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10rem), 1fr)); gap: .6rem; }}
.facts div {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }}
.facts dt {{ font-size: .85rem; color: var(--soft); }}
.facts dd {{ margin: 0; }}
.facts b {{ font-size: 1.15rem; display: block; }}
.facts small {{ display: block; line-height: 1.35; }}
.alarm {{ background: var(--alarm); border-left: .3rem solid var(--alarm-line); padding: .5rem .8rem;
  margin: .5rem 0; }}
.wide {{ overflow-x: auto; }}
.notes, details {{ font-size: .9rem; }}
.notes {{ padding-left: 1.2rem; }}
summary {{ cursor: pointer; margin: .5rem 0; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
td, th {{ border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }}
@media (max-width: 34rem) {{ td, th {{ padding: .25rem .3rem; }} body {{ padding: 1rem .7rem; }}
  .group table {{ font-size: .78rem; }} }}
th:first-child, td:first-child {{ position: sticky; left: 0; background: var(--paper); }}
.group th:first-child, .group td:first-child {{ background: var(--card); }}
td:first-child code {{ white-space: nowrap; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.up {{ color: var(--up); }}
.down {{ color: var(--down); }}
.group {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; margin: .6rem 0; }}
.group table {{ width: 100%; }}
.text {{ margin: .5rem 0 0; padding-top: .4rem; border-top: 1px solid var(--line); }}
.long {{ max-height: 12rem; overflow-y: auto; }}
td details {{ font-size: inherit; }}
td summary {{ margin: 0; }}
code, pre {{ font-size: .85rem; overflow-wrap: anywhere; white-space: pre-wrap; }}
</style>
{body}
</html>
"""


TEMPLATES = Environment(
    loader=PackageLoader("oblrpo.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, finalize=lambda value: value if isinstance(value, Markup) else seen(str(value)),
)  # fmt: skip
"""The templates of pages; `page.html` is the shell of all of them."""
TEMPLATES.globals |= {"FOLDED_FROM": 240, "SHOWN_AT_ENDS": 2000}  # characters; a longer text is folded, and then cut


def render(name: str, **values: Any) -> str:
    """Return a page from the template `name`."""
    return TEMPLATES.get_template(name).render(values)


def markup(form: str, *values: str) -> Markup:
    """Return HTML in which each `{}` of the form is a text."""
    return Markup(form).format(*(value if isinstance(value, Markup) else seen(value) for value in values))

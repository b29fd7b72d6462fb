"""The shell of every page: one look, light and dark, laptop and phone; no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def page(title: str, body: Iterable[str]) -> str:
    """A whole page; `body` is HTML, `title` text."""
    return PAGE.format(title=text(title), body="\n".join(body))


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where the screen is narrow; cells are HTML."""
    head = "".join(f"<th>{name}" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f"<div class=wide><table><tr>{head}{lines}</table></div>"


def charts(drawings: Iterable[str], large: bool = False) -> str:
    """Charts beside each other, as many as the screen is wide: three of a laptop's, or two large ones."""
    kind = '"charts large"' if large else "charts"
    return f"<div class={kind}>{''.join(drawings)}</div>"


def text(plain: str) -> str:
    """Text as HTML."""
    return escape(plain)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2433; --paper: #fff; --line: #d6dae3; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #dfe4ee; --paper: #14181f; --line: #39414f; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }}
.large {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }}
.charts svg {{ width: 100%; max-width: 36rem; height: auto; color: var(--ink); }}
.wide {{ overflow-x: auto; }}
h2 {{ margin-top: 2rem; }}
.notes, details {{ font-size: .9rem; }}
.notes {{ padding-left: 1.2rem; }}
summary {{ cursor: pointer; margin: .5rem 0; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
td, th {{ border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }}
code, pre {{ font-size: .85rem; overflow-wrap: anywhere; white-space: pre-wrap; }}
</style>
{body}
</html>
"""

"""Text of anybody's in a page."""

import pytest

from oblrpo.report.html import page, text


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\" onload='x'", "&quot; onload=&#x27;x&#x27;"),
        ("a\x00b", r"a\u0000b"),
        ("pay \u202eeurt", r"pay \u202eeurt"),
        ("\u2067x\u2069", r"\u2067x\u2069"),
        ("a\u200bb\u2028c\U000e0041", r"a\u200bb\u2028c\ue0041"),
        ("half \ud800", r"half \ud800"),
        ("lines\n\tand שלום, 日本, é stay", "lines\n\tand שלום, 日本, é stay"),
    ],
)
def test_text_does_nothing_to_the_page(plain, shown):
    assert text(plain) == shown
    assert f"<title>{shown}</title>" in page(plain, [])
    page(plain, []).encode()

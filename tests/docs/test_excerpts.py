"""Pages that show code of the package show it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.excerpts import excerpt, refreshed

from .pages import pages, title

_SHOWING = [page for page in pages() if "<!-- code: " in page.read_text()]


@pytest.mark.parametrize("page", _SHOWING, ids=title)
def test_page_shows_code_as_it_is(page: Path) -> None:
    text = page.read_text()
    assert refreshed(text) == text, "write the excerpts anew: python -m tools.excerpts"


def test_excerpt_is_the_whole_method() -> None:
    code = excerpt("tools/excerpts.py", "excerpt", bare=True)
    assert code.startswith("def excerpt(")
    assert '"""' not in code
    assert "return textwrap.dedent" in code.splitlines()[-1]


def test_name_that_is_gone_is_told() -> None:
    with pytest.raises(LookupError, match="no Nothing"):
        excerpt("tools/excerpts.py", "Nothing")

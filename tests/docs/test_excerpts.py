"""What pages show of other files is as it is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.excerpts import excerpt, refreshed
from tools.reference import described

from .pages import pages, title

_MARK = re.compile(r"^<!-- (?:code|file|reference|commands|columns)\b", re.MULTILINE)
_SHOWING = [page for page in pages() if _MARK.search(page.read_text())]


@pytest.mark.parametrize("page", _SHOWING, ids=title)
def test_page_shows_files_as_they_are(page: Path) -> None:
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


def test_signatures_are_those_of_users() -> None:
    lock = described("aiodlock.Client").partition("### lock\n")[2].partition("### ")[0]
    assert "ttl: float | None = None," in lock
    assert "Never" not in lock
    assert "self" not in lock
    assert "timeout: float | None = ..." in described("aiodlock.Lock", bare=True)
    assert "- `max_hold`: seconds after which" in lock

"""The pages as they are read in the repository, where the package index leads: no site is built there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.excerpts import SECTION

from .pages import ROOT, pages, title

PAGES = [*pages(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+).*?^(?P=indent)(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code, its inline code and its comments."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]+`", lambda code: "x" * len(code[0]), text)


def anchors(page: Path) -> set[str]:
    """Return where links into a page may lead: its headings, as GitHub names them, and its own anchors."""
    text = page.read_text("utf-8")
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_page_holds_what_it_shows(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "--8<--" not in text
    assert not re.search(r"^::: ", text, re.MULTILINE)
    assert "<svg" not in text  # GitHub leaves out drawings that stand in a page


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in _LINK.findall(prose(page)) + _PICTURE.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


#: The pages that are read in a hurry, and those that users read first. Contributors have others.
USERS = [page for page in pages() if "internals" not in page.parts or page.stem == "faults"]
#: What had to be read twice, and how it is said now.
HARD = {
    "recall has arrived": "before it hears that somebody waits",
    "recall had arrived": "before it hears that somebody waits",
    "plus its lock-delay": "and then for its `lock_delay`",
    "ignores its lost lease": "goes on after it lost the lock",
    "whose lease is in its way": "that holds the name and has to release it",
    "1⅓": "13 s by default",
    "ordered by ticket": "nearly in order of arrival",
    "by ticket": "nearly exact",
    "unwinds the inherited": "cleans up the event loop that it got from its parent",
    "nobody deletes": "let nobody delete",
}


@pytest.mark.parametrize("page", USERS, ids=title)
def test_lines_of_prose_are_short(page: Path) -> None:
    long = [
        line
        for line in _FENCE.sub("", SECTION.sub("", page.read_text("utf-8"))).splitlines()
        if len(line) > 200 and not re.match(r"\s*(\||<|!\[)", line)
    ]
    assert not long


@pytest.mark.parametrize("page", USERS, ids=title)
def test_page_says_what_it_means(page: Path) -> None:
    text = " ".join(page.read_text("utf-8").split()).lower()
    assert not [words for words in HARD if words.lower() in text]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/reference/*.md")), ids=title)
def test_reference_tells_users_nothing_of_the_inside(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "Mutable state" not in text
    assert "new empty dictionary" not in text, "a value's docstring, not the variable's"
    assert "Returns `s`" not in text
    assert not re.search(r"\bcore: Core\b|\brunning: Running\b", text)

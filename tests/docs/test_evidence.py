"""The pages of evidence name files, modules and targets that there are."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGES = ("evidence", "mutation", "campaigns")
_PAGE = "".join((_ROOT / f"docs/internals/{page}.md").read_text() for page in _PAGES)
_FOLDERS = {"T": "tests/contract", "F": "tests/fault"}


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", _PAGE))
    assert named
    missing = [path for path in named if not (_ROOT / path).exists()]
    assert not missing


def test_tests_of_each_promise_are_in_the_folder_of_their_command() -> None:
    cells = re.findall(r"\*\*(T|F)\*\* ((?:`test_\w+\.py`(?:, )?)+)", _PAGE)
    assert len(cells) > 10
    for folder, files in cells:
        for file in re.findall(r"test_\w+\.py", files):
            assert (_ROOT / _FOLDERS[folder] / file).exists(), (folder, file)


def test_modules_and_targets_that_the_page_names_exist() -> None:
    for module in re.findall(r"python -m (tests[\w.]+)", _PAGE):
        path = _ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    makefile = (_ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", _PAGE):
        assert f"\n{target}:" in makefile, target


def claims() -> list[tuple[str, str, list[str]]]:
    """Return the page, the sentence and the tests of each row about a claim."""
    text = (_ROOT / "docs/internals/evidence.md").read_text()
    section = text.partition("## Claims and their tests")[2].partition("\n## ")[0]
    found = []
    for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        page, _, table = part.partition("\n")
        for sentence, tests in re.findall(r"^\| (.+?) \| (`.+`) \|$", table, re.MULTILINE):
            found.append((page.strip(), sentence, re.findall(r"`([^`]+)`", tests)))
    return found


def plain(text: str) -> str:
    """Return markdown as it is read: without links, emphasis and line breaks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(text.replace("*", "").split())


def test_claims_stand_on_their_pages() -> None:
    assert len(claims()) > 50
    for page, sentence, _ in claims():
        assert plain(sentence) in plain((_ROOT / page).read_text()), (
            f"{page} does not say: {sentence}"
        )


def test_claims_have_tests_that_exist() -> None:
    for page, sentence, tests in claims():
        for test in tests:
            file, _, name = test.partition("::")
            source = (_ROOT / "tests" / file).read_text()
            assert re.search(rf"def {name}\(", source), f"{page}: {sentence}: no {test}"

"""The pages of the documentation, and the code in them.

What stands in front of a block, as a comment that no reader sees, says what is special about it:

    <!-- raises: LockLost -->      the block has to raise that
    <!-- not run: the reason -->   it is compiled only
    <!-- check                     code that runs here and is not shown
    assert total == 1
    -->

What ``tools.excerpts`` writes into a page is tested where it comes from, and is no block of the page.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.excerpts import SECTION

ROOT = Path(__file__).parents[2]

_PIECE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$"
    r"|^<!--\s*(?P<word>raises|not run|check|file|code)\b:?\s*(?P<text>.*?)-->",
    re.DOTALL | re.MULTILINE,
)
# `aiodlock wait` and `aiodlock hold` are names of spans.
_INLINE = re.compile(r"(?<!`)`(aiodlock (?!wait|hold)[a-z]+(?: [^`]*)?|make [a-z]+)`(?!`)")
_SHELLS = ("console", "sh")


@dataclass(frozen=True)
class Block:
    """Code of a page; ``line`` is that of its first line."""

    language: str
    code: str
    line: int
    raises: str = ""
    runs: bool = True


def pages() -> list[Path]:
    """Return the README and every page of the documentation."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def title(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[Block]:
    """Find the blocks of a page, shown and hidden, in their order."""
    raises, runs, written = "", True, False
    text = SECTION.sub(lambda found: "\n" * found[0].count("\n"), text)
    for piece in _PIECE.finditer(text):
        start = piece.start("text" if piece["language"] is None else "code")
        line = text.count("\n", 0, start) + 1
        match piece["word"]:
            case "raises":
                raises = piece["text"].strip()
            case "not run":
                runs = False
            case "file" | "code":
                written = True
            case "check":
                yield Block("python", textwrap.dedent(piece["text"]), line)
            case _ if written:
                written = False
            case _:
                code = textwrap.dedent(piece["code"])
                yield Block(piece["language"], code, line, raises, runs)
                raises, runs = "", True


def python(page: Path) -> list[Block]:
    """Return what runs of a page."""
    return [block for block in blocks(page.read_text("utf-8")) if block.language == "python"]


def commands(page: Path) -> list[str]:
    """Return what a page tells the reader to type into a shell."""
    text = page.read_text("utf-8")
    typed: list[str] = []
    for block in blocks(text):
        if block.language in _SHELLS:
            lines = block.code.replace("\\\n", " ").splitlines()
            if block.language == "console":  # the rest is what the command prints
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            typed += lines
        elif block.language == "crontab":
            entries = [line for line in block.code.splitlines() if not re.match(r"[A-Z_]+=", line)]
            typed += [entry.split(maxsplit=5)[5] for entry in entries]
    return typed + _INLINE.findall(text)


def included(page: Path) -> list[str]:
    """Return the files that a page shows."""
    return re.findall(r"^<!-- file: (\S+) -->$", page.read_text("utf-8"), re.MULTILINE)

"""What pages show of other files: kept the same as those files.

Pages are read in the repository, too, where nothing is put in when a page is shown. So it stands in them.
A comment says what stands behind it:

    <!-- code: aiodlock/_lock.py Acquirable._wait_for_turn -->    a class, function or method
    <!-- file: examples/moving.py -->                             a file
    <!-- reference: aiodlock.Client -->  ...  <!-- end -->        signatures and docstrings
    <!-- commands -->  ...  <!-- end -->                          what the command's help says
    <!-- columns -->  ...  <!-- end -->                           the columns of its tables

With the word ``bare`` at the end, code has no docstring, and a class of the reference no constructor.
`python -m tools.excerpts` writes all of them anew; a test holds them to their files.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from tools.commands import columns, commands
from tools.reference import described

ROOT = Path(__file__).parents[1]

_EXCERPT = re.compile(
    r"<!-- code: (?P<file>\S+) (?P<name>\S+?)(?P<bare> bare)? -->\n```py[^\n]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)

_FILE = re.compile(
    r"<!-- file: (?P<file>\S+) -->\n(?P<fence>```[^\n]+\n)(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
#: What the site makes by itself, with links, stands between two comments.
SECTION = re.compile(
    r"^<!-- (?P<kind>reference|commands|columns)(?:: (?P<name>\S+))?(?P<bare> bare)? -->\n"
    r"(?P<text>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)

_Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def excerpt(file: str, name: str, *, bare: bool = False) -> str:
    """Return the source of what has this qualified name.

    :raises LookupError: when the file has nothing of that name.
    """
    text = (ROOT / file).read_text()
    node = _find(ast.parse(text).body, name.split("."))
    if node is None:
        raise LookupError(f"{file} has no {name}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    if bare and ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        del lines[docstring.lineno - first : docstring.end_lineno - first + 1]
    return textwrap.dedent("\n".join(lines)) + "\n"


def _find(body: list[ast.stmt], names: list[str]) -> _Named | None:
    for node in body:
        if isinstance(node, _Named) and node.name == names[0]:
            return node if len(names) == 1 else _find(node.body, names[1:])
    return None


def refreshed(page: str) -> str:
    """Return the text of a page with each excerpt as the code is now."""

    def anew(found: re.Match[str]) -> str:
        code = excerpt(found["file"], found["name"], bare=bool(found["bare"]))
        head = f"<!-- code: {found['file']} {found['name']}{found['bare'] or ''} -->\n"
        return f'{head}```py title="{found["file"]}"\n{code}```'

    def file(found: re.Match[str]) -> str:
        text = (ROOT / found["file"]).read_text()
        return f"<!-- file: {found['file']} -->\n{found['fence']}{text}```"

    def section(found: re.Match[str]) -> str:
        head, _, _ = found[0].partition("\n")
        return f"{head}\n{_made(found)}\n<!-- end -->"

    return SECTION.sub(section, _FILE.sub(file, _EXCERPT.sub(anew, page)))


def _made(found: re.Match[str]) -> str:
    match found["kind"]:
        case "commands":
            return commands()
        case "columns":
            return columns()
        case _:
            return described(found["name"], bare=bool(found["bare"]))


def main() -> None:
    """Write all pages that have excerpts anew."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = page.read_text()
        if (new := refreshed(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT).as_posix())


if __name__ == "__main__":
    main()

"""Code that pages show: kept the same as the code itself.

A block that stands behind such a comment is the text of a class, function or method of the package:

    <!-- code: aiodlock/_lock.py Acquirable._wait_for_turn -->

`python -m tools.excerpts` writes the blocks anew; a test holds them to the code. Docstrings are left out
where the comment ends with the word `bare`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]

_EXCERPT = re.compile(
    r"<!-- code: (?P<file>\S+) (?P<name>\S+?)(?P<bare> bare)? -->\n```py[^\n]*\n(?P<code>.*?)^```$",
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

    return _EXCERPT.sub(anew, page)


def main() -> None:
    """Write all pages that have excerpts anew."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = page.read_text()
        if (new := refreshed(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT).as_posix())


if __name__ == "__main__":
    main()

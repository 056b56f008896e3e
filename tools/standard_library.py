"""Where the standard library's documentation describes the types that our signatures name.

mkdocstrings would fetch the whole list (``objects.inv``) from there at each build, which must not need a
network. So the few lines of it that are needed stand here, in its format.
"""

from __future__ import annotations

import zlib
from pathlib import Path

BASE = "https://docs.python.org/3/"
#: Page, role, and the names that it describes; the anchor is the name.
_PAGES = (
    ("library/functions.html", "class", "bool float int object"),
    ("library/stdtypes.html", "class", "bytes dict frozenset list set str tuple"),
    ("library/constants.html", "data", "None"),
    (
        "library/exceptions.html",
        "exception",
        "BaseException ConnectionError Exception RuntimeError TimeoutError TypeError ValueError",
    ),
    (
        "library/collections.abc.html",
        "class",
        "AsyncIterator Awaitable Callable Collection Coroutine Iterable Iterator Mapping Sequence",
    ),
    ("library/contextlib.html", "class", "AbstractAsyncContextManager AbstractContextManager"),
    ("library/types.html", "class", "TracebackType"),
    ("library/typing.html", "data", "Annotated Any Literal Never Self"),
)
_HEADER = """# Sphinx inventory version 2
# Project: Python
# Version: 3
# The remainder of this file is compressed using zlib.
"""


def write_inventory(path: Path) -> None:
    """Write what Sphinx calls an inventory: which name is described where."""
    lines = []
    for page, role, names in _PAGES:
        module = page.removeprefix("library/").removesuffix(".html")
        prefix = f"{module}." if module in _MODULES else ""
        lines += [f"{prefix}{name} py:{role} 1 {page}#$ -\n" for name in names.split()]
    path.write_bytes(_HEADER.encode() + zlib.compress("".join(lines).encode()))


_MODULES = ("collections.abc", "contextlib", "types", "typing")

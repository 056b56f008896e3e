"""Run the Python of one page, as its reader would type it. Usage: run_page PAGE URL.

The blocks of a page run in order, in one namespace, with ``await`` allowed at the top. It is empty to begin
with, as at the prompt: what a page uses, it has imported or made. Functions named ``test_...`` are called
when their block has run, as pytest would do it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiodlock

from .pages import Block, python, title

SHOWN_URL = "redis://localhost:6379/0"


class Reader:
    """Types a page's blocks into one namespace."""

    def __init__(self, page: Path, url: str, runner: asyncio.Runner) -> None:
        self._page = page
        self._url = url
        self._runner = runner
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def type_in(self, block: Block) -> None:
        try:
            self._run(block)
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if block.raises not in kinds:
                error.add_note(f"in the block at {title(self._page)}:{block.line}")
                raise
        else:
            assert not block.raises, f"{title(self._page)}:{block.line} raises no {block.raises}"

    async def leave(self) -> None:
        """Close what the page has opened at the prompt."""
        client = self.names.get("client")
        if isinstance(client, aiodlock.Client):
            await client.__aexit__(None, None, None)
        if "redis" in self.names:
            await self.names["redis"].aclose()

    def _run(self, block: Block) -> None:
        # Line numbers of a traceback are those of the page.
        source = "\n" * (block.line - 1) + block.code.replace(SHOWN_URL, self._url)
        await_at_top = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(source, str(self._page), "exec", flags=await_at_top, dont_inherit=True)
        known = dict(self.names)
        if not block.runs:
            return
        result = eval(code, self.names)
        if code.co_flags & inspect.CO_COROUTINE:
            self._await(result)
        for name, value in self.names.items():
            if name.startswith("test_") and known.get(name) is not value:
                result = value()
                if inspect.iscoroutine(result):
                    self._await(result)

    def _await(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._runner.run(coroutine)


def main(page: Path, url: str) -> None:
    """Run a page; what goes wrong comes out as a traceback."""
    with asyncio.Runner() as runner:
        reader = Reader(page, url, runner)
        for block in python(page):
            reader.type_in(block)
        runner.run(reader.leave())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

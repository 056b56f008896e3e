"""The README's python blocks run as they stand, but for the address of the server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from ..servers import Store

README = Path(__file__).parents[2] / "README.md"


async def test_readme_examples_run_as_typed(store: Store) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert "redis://localhost:6379/0" in block
        url = "memory://" if store.is_memory else store.url
        code = block.replace("redis://localhost:6379/0", url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", code, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0
        assert b"mine, with token" in printed

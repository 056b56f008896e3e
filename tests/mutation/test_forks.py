"""What a mutant's fork has in its memory in the place of a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PUT = """
from pathlib import Path
{imports}
from tests.mutation.forks import put
path = Path({path!r})
text = path.read_text()
assert text.count({old!r}) == 1
put({language!r}, path, text.replace({old!r}, {new!r}))
print({found})
"""


@pytest.mark.parametrize(
    ("language", "file", "imports", "old", "new", "found"),
    [
        (
            "lua",
            "redis/lua/reading.lua",
            "from aiodlock.backends.redis.scripts import ACQUIRE, VOTE",
            "if now < record.closed_until then",
            "if mutated then",
            "b'if mutated then' in ACQUIRE.source and b'if mutated then' in VOTE.source",
        ),
        (
            "sql",
            "postgres/schema.sql",
            "from aiodlock.backends.postgres.schema import create_statements",
            "if cardinality(holders) = 0 then",
            "if mutated then",
            "'if mutated then' in create_statements()",
        ),
        (
            "python",
            "memory/machine.py",
            "from aiodlock.backends.memory.machine import Name",
            "if changed or nearer or",
            "if mutated or nearer or",
            "'mutated' in Name.leave.__code__.co_names",
        ),
    ],
)
def test_fork_reads_the_mutant(
    language: str, file: str, imports: str, old: str, new: str, found: str
) -> None:
    path = str(_ROOT / "aiodlock/backends" / file)
    code = _PUT.format(language=language, path=path, imports=imports, old=old, new=new, found=found)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "True\n", ran.stderr

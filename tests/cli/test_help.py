"""What the command says about itself: help texts, the version, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from aiodlock._options import check_kind
from aiodlock.cli import _app

GROUP: Any = typer.main.get_command(_app.app)
#: Rich cuts lines in a narrow terminal, and colours them in CI.
WIDE = {"COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(_app.app, arguments, env=WIDE)
    assert result.exit_code == 0, result.output
    return result.output


def words(text: str) -> list[str]:
    """Return the words of a help text, without what marks code and lists in Markdown."""
    return re.sub(r"^\s*- |`", "", text, flags=re.MULTILINE).split()


@pytest.mark.parametrize("name", ["", *GROUP.commands])
def test_help_shows_every_word_that_was_written(name: str) -> None:
    command = GROUP.commands[name] if name else GROUP
    shown = words(re.sub(r"[│╭╮╰╯─•]", " ", invoke(*name.split(), "--help")))
    texts = [command.help, *(one.help for one in command.params if not one.hidden)]
    written = [word for text in texts for word in words(text or "")]
    assert written
    assert [word for word in written if word not in shown] == []


def test_list_of_commands_names_the_extra_of_the_demo() -> None:
    assert "aiodlock[demo]" in invoke("--help")


@pytest.mark.parametrize("command", ["show", "break"])
def test_kinds_that_are_offered_are_those_that_are_accepted(command: str) -> None:
    offered = re.search(r"--kind\s+[<\[]([a-z|]+)[>\]]", invoke(command, "--help"))
    assert offered is not None
    assert [check_kind(one) for one in offered[1].split("|")] == ["lock", "semaphore", "once"]


def test_version() -> None:
    assert invoke("--version") == f"aiodlock {version('aiodlock')}\n"


@pytest.mark.parametrize(
    ("typed", "offered"), [("d", {"doctor", "demo", "deadlocks"}), ("run --q", {"--quiet"})]
)
def test_shell_completes_commands_and_options(typed: str, offered: set[str]) -> None:
    line = f"aiodlock {typed}"
    completion = {
        "_AIODLOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['aiodlock']; from aiodlock.cli import main; main()",
        ],
        env={**os.environ, **completion},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert set(done.stdout.split()) == offered, done.stderr

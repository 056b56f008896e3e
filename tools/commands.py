"""What the command ``aiodlock`` says about itself, as markdown."""

from __future__ import annotations

from typing import Any

import typer.main

from aiodlock.cli import _bench, _finding, _show
from aiodlock.cli._app import app


def commands() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join(_command(name, one) for name, one in group.commands.items()).rstrip()


def columns() -> str:
    tables = {"ls": _show.COLUMNS, "doctor": _finding.COLUMNS, "bench": _bench.COLUMNS}
    lines = []
    for command, columns in tables.items():
        lines += [f"| `aiodlock {command}` | |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in columns.items()]
        lines.append("")
    return "\n".join(lines).rstrip()


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["aiodlock", name, *command.collect_usage_pieces(context)])
    lines = [f"## aiodlock {name}", "", "```text", usage, "```", "", command.help, ""]
    lines += ["| option or argument | what it does | default |", "|---|---|---|"]
    lines += [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]
    return "\n".join([*lines, ""])


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    words = parameter.opts if is_option else [parameter.metavar or parameter.name.upper()]
    shown = ", ".join(f"`{word}`" for word in words)
    default = "" if parameter.default in (None, False, "") else f"`{parameter.default}`"
    return f"| {shown} | {parameter.help or ''} | {default} |"

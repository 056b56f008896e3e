"""Fills the page of the command: what ``aiodlock ... --help`` says, for every command."""

from __future__ import annotations

from typing import Any

import typer.main

from aiodlock.cli._app import app

MARK = "<!-- the commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return markdown.replace(MARK, _commands()) if MARK in markdown else markdown


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["aiodlock", name, *command.collect_usage_pieces(context)])
    lines = [f"## aiodlock {name}", "", "```text", usage, "```", "", command.help, ""]
    lines += ["| | | default |", "|---|---|---|"]
    lines += [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]
    return "\n".join([*lines, ""])


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    words = parameter.opts if is_option else [parameter.name.upper()]
    shown = ", ".join(f"`{word}`" for word in words)
    default = "" if parameter.default in (None, False, "") else f"`{parameter.default}`"
    return f"| {shown} | {parameter.help or ''} | {default} |"

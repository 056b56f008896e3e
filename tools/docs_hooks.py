"""What mkdocs is told besides ``mkdocs.yml``.

- Pages that are made from other files: the command's help, CHANGELOG.md, CONTRIBUTING.md, SECURITY.md.
- The version and the repository, from ``pyproject.toml``.
- Scripts of others, so that the site needs no network: a page loads them from ``assets/``.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from aiodlock.cli import _bench, _finding, _show
from aiodlock.cli._app import app
from tools.npm import SCRIPTS, fetch
from tools.standard_library import BASE, write_inventory

ROOT = Path(__file__).parents[1]
COMMANDS = "<!-- the commands -->"
COLUMNS = "<!-- the columns -->"
#: Pages whose text stands in the root of the repository, where people look for it.
FROM_ROOT = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
}
DIAGRAM = '<pre class="mermaid">'


@event_priority(100)  # type: ignore[misc,untyped-decorator,unused-ignore]  # before mkdocstrings
def on_config(config: Any, **_: Any) -> Any:
    config.site_name = f"aiodlock {_project()['version']}"
    config.repo_url = _repository()
    config.repo_name = "Repository"
    inventory = ROOT / "build" / "python.inv"
    inventory.parent.mkdir(exist_ok=True)
    write_inventory(inventory)
    python = config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})
    python["inventories"] = [{"url": inventory.as_uri(), "base_url": BASE}]
    return config


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    for script in SCRIPTS:
        source = str(fetch(script))
        files.append(File.generated(config, f"assets/{script.name}", abs_src_path=source))
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for mark, make in ((COMMANDS, _commands), (COLUMNS, _columns)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load the script that draws diagrams on the pages that have one: it is 3 MB."""
    if DIAGRAM not in output:
        return output
    up = "../" * page.url.count("/")
    script = f'<script src="{up}assets/mermaid.min.js"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def _moved(text: str) -> str:
    """Let links of a file in the root lead from a page in ``docs/project``, or to the repository."""
    text = text.replace("](docs/", "](../")
    return re.sub(
        r"\]\((?!https?://|\.\./|#)([^)]*/[^)]*)\)", rf"]({_repository()}/blob/main/\1)", text
    )


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def _repository() -> str:
    repository: str = _project()["urls"]["Repository"]
    return repository


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _columns() -> str:
    tables = {"ls": _show.COLUMNS, "doctor": _finding.COLUMNS, "bench": _bench.COLUMNS}
    lines = []
    for command, columns in tables.items():
        lines += [f"| `aiodlock {command}` | |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in columns.items()]
        lines.append("")
    return "\n".join(lines)


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

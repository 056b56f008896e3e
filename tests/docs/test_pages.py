"""Every Python block of the documentation runs; every command and file that it names exists."""

from __future__ import annotations

import ast
import asyncio
import codeop
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import aiodlock
import aiodlock.fastapi
import aiodlock.sync
import aiodlock.testing
import aiodlock.web
from aiodlock import fencing, otel
from aiodlock.cli import _run_words
from aiodlock.cli._app import app

from ..servers import Store
from .pages import ROOT, blocks, commands, included, pages, python, title

WITH_PYTHON = [page for page in pages() if python(page)]
WITH_COMMANDS = [page for page in pages() if commands(page)]
#: What a page says whose examples are for the prompt.
PROMPT = "`python -m asyncio`"
PAGES_WITH_FILES = [page for page in pages() if included(page)]


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=title)
async def test_python_of_the_page_runs(page: Path, store: Store) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "tests.docs.run_page", str(page), store.url),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, printed.decode()


async def _type_at_the_prompt(typed: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncio"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(typed.encode()), 120)
    return printed.decode()


@pytest.mark.parametrize(
    "page", [page for page in pages() if PROMPT in page.read_text()], ids=title
)
def test_page_for_the_prompt_can_be_typed_there(page: Path) -> None:
    """The prompt takes a line at a time. A statement with an indented body ends at an empty line."""
    compiles = codeop.CommandCompiler()
    compiles.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for block in python(page):
        typed: list[str] = []
        for line in [*block.code.splitlines(), ""]:
            typed.append(line)
            try:
                if compiles("\n".join(typed), title(page)) is not None:
                    typed = []
            except SyntaxError as wrong:
                wrong.add_note(f"in the block at {title(page)}:{block.line}: " + "\n".join(typed))
                raise


async def test_tutorial_can_be_typed_at_the_prompt() -> None:
    """Blank lines end a block there, and only there."""
    newer = sys.version_info >= (3, 13)
    if newer and "Error" in await _type_at_the_prompt("if True:\n    pass\n\n"):
        pytest.skip("the prompt of this Python (3.13.0, say) takes no blocks from a pipe")
    typed = "\n".join(block.code for block in python(ROOT / "docs/tutorial.md"))
    printed = await _type_at_the_prompt(typed)
    assert "Error" not in printed, printed


def test_session_wide_fixture_of_the_page_can_be_used(tmp_path: Path) -> None:
    page = ROOT / "docs/how-to/testing.md"
    (block,) = [one for one in blocks(page.read_text()) if "loop_scope=" in one.code]
    mark = "@pytest.mark.asyncio(loop_scope='session')"
    second = (
        f"\n\n{mark}\nasync def test_again(locks):\n    async with locks.lock('x'):\n        pass\n"
    )
    (settings,) = [one for one in blocks(page.read_text()) if one.language == "toml"]
    plain = re.sub(r"@pytest.mark.asyncio.*\n|, loop_scope=\"session\"", "", block.code + second)
    for text, options in ((block.code + second, ""), (plain, settings.code)):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pyproject.toml").write_text(options)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "2 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=title)
def test_commands_of_the_page_exist(page: Path) -> None:
    for command in commands(page):
        try:
            check_command(command)
        except Exception as error:
            error.add_note(f"in {title(page)}: {command}")
            raise


@pytest.mark.parametrize("page", PAGES_WITH_FILES, ids=title)
def test_files_shown_on_the_page_are_tested(page: Path) -> None:
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    for path in included(page):
        assert re.search(rf"\b{Path(path).stem}\b", tests), f"{path} has no test"


def test_readme_links_to_pages_that_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_readme_on_a_package_index_links_to_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    readme = (ROOT / "README.md").read_text()
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        readme = re.sub(change["pattern"], change["replacement"], readme)
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 20
    repository = project["project"]["urls"]["Repository"]
    for link in links:
        assert link.startswith(("https://", "#")), link
    assert f"{repository}/blob/main/docs/tutorial.md" in links


def test_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    shown = set(
        re.findall(r"^<!-- reference: aiodlock\.([A-Za-z]\w*)(?: bare)? -->$", text, re.MULTILINE)
    )
    public = {name for name, value in vars(aiodlock).items() if is_public(name, value)}
    assert shown == public


@pytest.mark.parametrize(
    "module", [aiodlock.fastapi, aiodlock.sync, aiodlock.testing, aiodlock.web, otel, fencing]
)
def test_reference_has_every_public_name_of_the_module(module: ModuleType) -> None:
    text = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    shown = set(
        re.findall(rf"^<!-- reference: {module.__name__}\.(\w+)(?: bare)? -->$", text, re.MULTILINE)
    )
    own = {
        name
        for name, value in vars(module).items()
        if is_public(name, value) and getattr(value, "__module__", "").startswith(module.__name__)
    }
    assert own
    assert own <= shown


def check_command(line: str) -> None:
    """Raise when a command, or an option of ours, does not exist. Others' programs are not looked at."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    words[:1] = [Path(word).name for word in words[:1]]
    match words:
        case ["aiodlock", *rest]:
            check_ours(rest)
        case ["make", target, *_]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            for asked in re.findall(r"aiodlock\[([^\]]+)\]", " ".join(packages)):
                assert set(asked.split(",")) <= set(extras["optional-dependencies"])
        case ["python", "-m", module, *_] | ["uvicorn", module, *_] | ["gunicorn", module, *_]:
            if module.startswith(("aiodlock", "examples", "benchmarks")):
                assert importlib.util.find_spec(module.partition(":")[0]) is not None


def check_ours(words: list[str]) -> None:
    """Parse the arguments as the command would, and do nothing else."""
    group: Any = typer.main.get_command(app)
    assert words, "a command of aiodlock is missing"
    if words[0].startswith("-"):
        assert words[0] in {word for one in group.params for word in one.opts}
        return
    command = group.commands.get(words[0])
    assert command is not None, f"there is no command 'aiodlock {words[0]}'"
    arguments = words[1:]
    # `aiodlock run` in running text is a name; with arguments it is something to type.
    if arguments and "..." not in arguments and "…" not in arguments:
        for end in ("|", "&&", "&", ";", ">", "2>"):
            if end in arguments:
                arguments = arguments[: arguments.index(end)]
        command.make_context(words[0], arguments)


def is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType)


def test_error_messages_of_the_page_are_those_of_the_code() -> None:
    shown = re.findall(r"^### `([^`]+)`$", (ROOT / "docs/help/errors.md").read_text(), re.MULTILINE)
    code = "".join(path.read_text() for path in ROOT.glob("aiodlock/**/*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", code)  # a message over several lines
    assert shown
    for message in shown:
        assert message in said, f"no error says {message!r}"


def test_every_missing_extra_is_on_the_page() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("aiodlock/**/*.py"))
    asked = set(re.findall(r"pip install 'aiodlock\[(\w+)\]'", code))
    shown = set(re.findall(r"`aiodlock\[(\w+)\]`", (ROOT / "docs/help/errors.md").read_text()))
    assert asked
    assert asked <= shown


def test_every_message_of_the_command_run_is_on_the_page() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("aiodlock/cli/_run*.py"))
    said = set(re.findall(r'say\(\s*\S*wanted,\s*"([a-z_]+)"', code))
    page = (ROOT / "docs/reference/command.md").read_text().partition("## Messages")[2]
    assert said
    assert said == set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE))
    (quiet,) = re.findall(r"^`--quiet` leaves out (.*?)\. ", page, re.MULTILINE)
    assert set(re.findall(r"`([a-z_]+)`", quiet)) == _run_words.QUIET


def test_every_event_of_the_log_is_on_the_page() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("aiodlock/**/*.py"))
    logged = set(re.findall(r'"event": "([a-z_]+)"', code))
    logged.update(re.findall(r'log\.tell\(\s*[A-Z]+,\s*"([a-z_]+)"', code))
    page = (ROOT / "docs/how-to/observability.md").read_text()
    shown = set(
        re.findall(r"`([a-z_]+)`", page.partition("## The log")[2].partition("To silence")[0])
    )
    assert logged
    assert logged <= shown

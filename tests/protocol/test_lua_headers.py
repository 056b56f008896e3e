"""The head of each script names the KEYS and ARGV that it uses, and no others."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from aiodlock.backends.redis import scripts

_ONCE = (scripts.ACQUIRE, scripts.EXTEND, scripts.LEAVE, scripts.INSPECT)
_LUA = files("aiodlock.backends.redis") / "lua"
_SCRIPTS = (*scripts.ALL, *scripts.VOTING)
_SHARED = {
    f"{name}.lua"
    for name in ("clock", "time", "tokens", "records", "holders", "reading", "prelude", "tickets")
}
_FILES = sorted(entry.name for entry in _LUA.iterdir() if entry.name.endswith(".lua"))


def _text(name: str) -> str:
    return (_LUA / name).read_text()


def _split(text: str) -> tuple[str, str]:
    lines = text.splitlines()
    end = next(at for at, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(line.removeprefix("--") for line in lines[:end]), "\n".join(lines[end:])


def _named(head: str, what: str) -> list[int]:
    """Return the numbers in a head's list `KEYS  1 state  2 queue ...`, which may go on."""
    found = re.search(rf"^ {what}  (.*(?:\n {{3,}}.*)*)", head, re.MULTILINE)
    return [int(number) for number in re.findall(r"(?:^|\s\s)(\d+) ", found[1])] if found else []


def _used(code: str, what: str) -> set[int]:
    return {int(number) for number in re.findall(rf"{what}\[(?:at \+ )?(\d+)\]", code)}


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.name)
def test_head_names_exactly_what_the_script_uses(script: scripts.Script) -> None:
    head, code = _split(_text(f"{script.name}.lua"))
    keys, arguments = _named(head, "KEYS"), _named(head, "ARGV")
    assert keys == list(range(1, len(keys) + 1))
    assert arguments == list(range(1, len(arguments) + 1))
    assert _used(code, "KEYS") == set(keys)
    assert _used(code, "ARGV") == set(arguments)
    # A name of kind `once` has one key more.
    own = [number for number in keys if number <= int(script.number_of_keys)]
    assert len(own) == int(script.number_of_keys)
    assert len(keys) == len(own) + (script in _ONCE)
    assert "Result" in head


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.name)
def test_names_in_the_head_are_those_in_the_code(script: scripts.Script) -> None:
    head, code = _split(_text(f"{script.name}.lua"))
    listed = re.search(r"^ KEYS  (.*)", head, re.MULTILINE)
    assert listed
    names = [part.split(" ", 1)[1].split(",")[0] for part in re.split(r"\s{2,}", listed[1].strip())]
    first = re.search(r"^ *local ([a-z_, ]+?) =\s+KEYS\[", code, re.MULTILINE)
    assert first
    variables = first[1].split(", ")
    assert [variable.removesuffix("_key") for variable in variables] == names


@pytest.mark.parametrize("shared", sorted(_SHARED))
def test_what_is_shared_uses_neither_keys_nor_arguments(shared: str) -> None:
    _, code = _split(_text(shared))
    assert "KEYS" not in code
    assert "ARGV" not in code


@pytest.mark.parametrize("name", _FILES)
def test_every_file_is_a_script_or_shared(name: str) -> None:
    assert name in _SHARED or name.removesuffix(".lua") in {script.name for script in _SCRIPTS}


@pytest.mark.parametrize("name", _FILES)
def test_only_locals_are_defined(name: str) -> None:
    _, code = _split(_text(name))
    declared = {
        variable
        for names in re.findall(r"local (?:function )?([a-z_, ]+)", code)
        for variable in names.strip().split(", ")
    }
    for line in code.splitlines():
        assert not line.startswith("function"), f"a global function: {line}"
        if assigned := re.match(r"([a-z_]+) = ", line):
            assert assigned[1] in declared, f"a global: {line}"


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.name)
def test_time_is_read_once(script: scripts.Script) -> None:
    code = re.sub(r"--.*", "", script.source.decode())
    reads = len(re.findall(r"['\"]TIME['\"]", code))
    assert reads == (script is not scripts.TELL)  # which leaves all times to the server
    assert not re.search(r"os\.(time|clock)|math\.random", code)

"""The tests once for each mutant: in forks of a process that has imported and collected them all.

What a fork costs is a hundredth of what pytest takes to start. Nothing is written: a fork has the mutant in
its memory, and the tests' files are those of the tree.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest

from .conditions import Language

#: What a mutant makes run for ever is noticed after so many seconds. What others starve takes minutes.
LONGEST = 900.0

#: Runs the tests that see a part of a file, with a text in the place of the file.
#: Returns the first test that fails, or nothing.
Try = Callable[[Path, str, str], str]


class Forks:
    """A plugin of pytest's that gives the tests it has collected to a campaign, instead of running them.

    ``stages``: what finds the ids of tests, in the order in which they run. Those that have noticed other
    mutants are run before, as mutants side by side are often noticed by the same test.
    ``blind``: the parts, files or functions, that the tests of a stage run nothing of.
    """

    def __init__(
        self,
        language: Language,
        stages: Sequence[str],
        blind: Mapping[str, str],
        campaign: Callable[[Try], None],
    ) -> None:
        self._language = language
        self._stages = [re.compile(stage) for stage in stages]
        self._blind = blind
        self._campaign = campaign
        self._noticed: Counter[str] = Counter()
        self._items: list[pytest.Item] = []
        self._failed = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("not all tests could be collected")
        self._items = [item for item in session.items if self._stage(item) is not None]
        self._campaign(self._try)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def _stage(self, item: pytest.Item) -> int | None:
        numbers = range(len(self._stages))
        return next((n for n in numbers if self._stages[n].search(item.nodeid)), None)

    def _place(self, item: pytest.Item) -> tuple[int, int]:
        return -self._noticed[item.nodeid], self._stage(item) or 0

    def _sees(self, item: pytest.Item, part: str) -> bool:
        stage = self._stages[self._stage(item) or 0].pattern
        return not re.fullmatch(self._blind.get(stage, "(?!)"), part)

    def _try(self, path: Path, part: str, text: str) -> str:
        items = sorted((item for item in self._items if self._sees(item, part)), key=self._place)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, f"{self._first_failure(items, path, text)}.".encode())
            finally:
                os._exit(0)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], LONGEST)
        if not ready:
            os.kill(child, signal.SIGKILL)
        told = os.read(reading, 1000).decode() if ready else "it does not end."
        os.close(reading)
        os.waitpid(child, 0)
        assert told, "the fork ended before its tests did"
        noticed_by = told[:-1]
        self._noticed[noticed_by] += 1
        return noticed_by

    def _first_failure(self, items: Sequence[pytest.Item], path: Path, text: str) -> str:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)
        put(self._language, path, text)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return self._failed
        return ""


def put(language: Language, path: Path, text: str) -> None:
    """Let this process have the text in the place of the file."""
    if language == "python":
        _recode(path, text)
        return
    read_bytes, read_text = Path.read_bytes, Path.read_text

    def bytes_of(self: Path) -> bytes:
        return text.encode() if self == path else read_bytes(self)

    def text_of(self: Path, *arguments: Any, **options: Any) -> str:
        return text if self == path else read_text(self, *arguments, **options)

    patch.object(Path, "read_bytes", bytes_of).start()
    patch.object(Path, "read_text", text_of).start()
    if language == "lua":
        _load_scripts()


def _load_scripts() -> None:
    """Give the scripts, which others have imported, the sources that are read now."""
    from aiodlock.backends.redis import scripts

    from ..simulation.server import _SCRIPTS as simulated

    assert scripts.__spec__ is not None
    assert scripts.__spec__.loader is not None
    fresh = module_from_spec(scripts.__spec__)
    scripts.__spec__.loader.exec_module(fresh)
    for script, new in zip(
        (*scripts.ALL, *scripts.VOTING), (*fresh.ALL, *fresh.VOTING), strict=True
    ):
        for name in ("source", "sha"):
            object.__setattr__(script, name, getattr(new, name))
            simulated[getattr(new, name)] = script.name


def _recode(path: Path, text: str) -> None:
    """Give the functions of a module, which others have imported, the code of the text."""
    module = next(one for one in sys.modules.values() if getattr(one, "__file__", "") == str(path))
    scratch = dict(vars(module))
    exec(compile(text, str(path), "exec"), scratch)
    _take_code(vars(module), scratch, module.__name__)


def _take_code(old: Mapping[str, Any], new: Mapping[str, Any], module: str) -> None:
    for name, value in new.items():
        mine = old.get(name)
        if isinstance(value, property):
            mine, value = getattr(mine, "fget", None), value.fget
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType) and isinstance(mine, FunctionType):
            mine.__code__ = value.__code__
        elif isinstance(value, type) and isinstance(mine, type):
            _take_code(vars(mine), vars(value), module)

"""What people see in a terminal: whole lines, whatever locks are called."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aiodlock import HolderInfo, LockInfo, WaiterInfo
from aiodlock.cli import _show

HOLDER = HolderInfo(
    "me", "exclusive", 1795214966688300, 1, 29.84, "a-host-with-a-name-5524-f5c60e02dada"
)
WAITER = WaiterInfo("you", "shared", 0, 12345.6, "b-host-9-4ec6a7e5af5b")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", ["x", "order:" + "42" * 100, "\x1b[31m\n", "[red]x[/red]"])
def test_table_fits_into_the_terminal_and_no_name_breaks_it(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(_show, "console", lambda: console)
    infos = [
        LockInfo(name, (HOLDER,), (WAITER,), 1795214966688300),
        LockInfo("free", (), (), 0, closed=3.25, kind="semaphore"),
    ]
    console.print(_show.table(infos))
    heading, first, second = (line.rstrip() for line in written.getvalue().splitlines())
    assert max(map(len, (heading, first, second))) <= width
    assert heading.endswith("s waited")
    assert first.split()[-3:] == ["29.8", "1", "12345.6"]
    assert second.split() == ["free", "semaphore", "closed", "0", "-", "3.2", "0", "0.0"]
    assert "\x1b" not in first
    if name.startswith("["):
        assert name in first


@pytest.mark.parametrize("width", range(10, 80, 3))
def test_narrow_terminal_shows_names_and_holders_and_fewer_columns(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(_show, "console", lambda: console)
    console.print(_show.table([LockInfo("order:42", (HOLDER,), (WAITER,), 1795214966688300)]))
    heading, first = (line.rstrip() for line in written.getvalue().splitlines())
    assert max(map(len, (heading, first))) <= width
    assert first.startswith("order:42")
    assert "…" not in heading.replace("held …", "")
    if width >= 28:
        assert "  a-ho" in first
    if width >= 40:
        assert heading.split()[-3:] == ["waiters", "s", "waited"]


def test_table_of_nothing_is_its_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(_show, "console", lambda: console)
    console.print(_show.table([]))
    assert written.getvalue().split()[:2] == ["name", "kind"]


def test_wide_letters_are_counted_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, width=120, force_terminal=True, color_system=None)
    monkeypatch.setattr(_show, "console", lambda: console)
    console.print(_show.table([LockInfo("日本語の名前", (HOLDER,), (), 1)]))
    assert "日本語の名前  " in written.getvalue()

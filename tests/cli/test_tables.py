"""What people see in a terminal: whole lines, whatever locks are called."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from aiodlock import HolderInfo, LockInfo, WaiterInfo
from aiodlock.cli import _show, _top

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


def test_table_tells_who_it_is_for_how_long_and_that_a_lease_is_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    console = Console(file=written, width=200, force_terminal=True, color_system=None)
    monkeypatch.setattr(_show, "console", lambda: console)
    late = HolderInfo(
        "leader:1:host-7",
        *("exclusive", 17, 1, 4.0, "c-1"),
        note="nightly\nrun",
        description="billing",
        holding=3671.25,
        ttl=30.0,
    )
    unknown = replace(
        late, owner="me", note="", description="", remaining=None, holding=None, ttl=None
    )
    infos = [LockInfo("a", (late,), (), 17), LockInfo("b", (unknown,), (), 17)]
    console.print(_show.table(infos))
    heading, first, second = written.getvalue().splitlines()
    assert " s held " in heading
    assert r'c-1 for host-7 (billing) "nightly\nrun"' in first
    assert " 3671.2 " in first
    assert " 4.0, overdue " in first
    assert second.split()[4:7] == ["c-1", "?", "?"]


def test_show_tells_that_a_lease_is_overdue(capsys: pytest.CaptureFixture[str]) -> None:
    late = replace(HOLDER, remaining=4.0, ttl=30.0, holding=26.0)
    _show.print_one(LockInfo("x", (late, replace(late, owner="you", remaining=29.0)), (), 17))
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "since 26.0 s" in first
    assert "4.0 s left, overdue: nobody has extended it" in first
    assert "overdue" not in second
    assert _show.as_dict(LockInfo("x", (late,), (), 17))["holders"][0]["overdue"] is True


def test_totals_tell_the_longest_wait_only_where_it_is_known() -> None:
    unknown = replace(WAITER, waiting=None)
    for waiters, longest in (((), 0.0), ((unknown,), None), ((unknown, WAITER), 12345.6)):
        facts = _top._facts([LockInfo("x", (HOLDER,), waiters, 17)], None)
        assert facts["longest_wait"] == longest

"""Holds the table of faults against the tests that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "faults.md"
STORES = ("valkey9", "redis70", "redis62")  # in the order of the columns
#: Files whose every test is a fault with a bound of its own.
WHOLE = ("fault/test_servers.py", "fault/test_stopped.py", "fault/test_killed.py")
#: A defect of what is said, not a fault.
NOT_LISTED = {
    "fault/test_stopped.py::test_leave_that_comes_after_the_lease_has_ended_and_was_swept_tells_that_it_expired"
}


def rows() -> list[tuple[str, set[str], list[str]]]:
    """Return the fault, the servers that are ticked, and the tests of each row."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and "::" in cells[6]:
            ticked = {store for store, mark in zip(STORES, cells[3:6], strict=True) if mark == "✓"}
            found.append((cells[0], ticked, re.findall(r"`([^`]+::[^`]+)`", cells[6])))
    return found


def rows_of_quorums() -> list[tuple[str, list[str]]]:
    """Return the fault and the tests of each row that is about several servers together."""
    lines = (line.strip("|").split("|") for line in PAGE.read_text().splitlines())
    return [
        (cells[0].strip(), re.findall(r"`([^`]+::[^`]+)`", cells[3]))
        for cells in lines
        if len(cells) == 4 and "::" in cells[3]
    ]


@pytest.fixture(scope="module")
def collected() -> dict[str, set[str]]:
    """Give the stores that each test runs on, as pytest finds them."""
    tests = [tests for *_, tests in rows()] + [tests for _, tests in rows_of_quorums()]
    files = {test.partition("::")[0] for row in tests for test in row} | set(WHOLE)
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        + [f"tests/{file}" for file in sorted(files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in listing.splitlines():
        match = re.fullmatch(r"tests/([^\[]+::[^\[]+)(\[.*\])?", line)
        if match:
            found[match[1]] |= {store for store in STORES if store in (match[2] or "")}
    return found


def test_table_names_tests_that_exist_and_the_servers_that_they_run_on(
    collected: dict[str, set[str]],
) -> None:
    assert len(rows()) > 30
    for fault, ticked, tests in rows():
        for test in tests:
            assert test in collected, f"{fault}: no such test: {test}"
            assert ticked == collected[test], f"{fault}: {test} runs on {collected[test]}"


def test_table_of_quorums_names_tests_that_exist(collected: dict[str, set[str]]) -> None:
    assert len(rows_of_quorums()) > 15
    for fault, tests in rows_of_quorums():
        assert tests, fault
        for test in tests:
            assert test in collected, f"{fault}: no such test: {test}"


def test_every_test_of_a_fault_is_in_the_table(collected: dict[str, set[str]]) -> None:
    listed = {test for _, _, tests in rows() for test in tests}
    faults = {test for test in collected if test.startswith(WHOLE)}
    assert faults - NOT_LISTED <= listed

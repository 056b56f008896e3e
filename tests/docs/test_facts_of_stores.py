"""What the pages say of stores, held against the code or against the page that has measured it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from aiodlock.cli import _app

from .pages import ROOT

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text("utf-8")


def test_page_counts_the_tables_of_postgresql() -> None:
    command = ["init", "--dry-run", "--url", "postgresql://owner@db/app"]
    sql = CliRunner().invoke(_app.app, command).output
    tables = re.findall(r"^create (?:unlogged )?table (?!if)", sql, re.MULTILINE)
    assert f"{_NUMBERS[len(tables)]} tables" in read("how-to/postgresql.md")


@pytest.mark.parametrize(
    ("chosen", "measured"),
    [
        ("[Sentinel]", "| Sentinel, `down-after-milliseconds` 3000 |"),
        ("[Cluster]", "| Cluster, node timeout 3 s |"),
        ("[etcd]", "| etcd, three members"),
    ],
)
def test_least_ttl_for_money_survives_the_longest_failover_that_was_measured(
    chosen: str, measured: str
) -> None:
    section = read("concepts/choosing.md").partition("### For money")[2].partition("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {chosen}")]
    least = float(row.split("|")[3].split()[0])
    (run,) = [line for line in read("concepts/stores.md").splitlines() if line.startswith(measured)]
    longest = max(map(float, re.findall(r"[0-9.]+(?=\))", run)))
    assert least - 1 < 1.5 * longest <= least

"""What a run found: kept as JSON, told as markdown, held against the targets."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from . import contenders as who
from .load import Row, Table
from .pairs import Measured

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
DEFAULT_LOOP = "asyncio's own loop"


@dataclass(frozen=True, slots=True)
class Figure:
    """The median and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratio(over: list[float], under: list[float]) -> Figure:
    """Compare by repetition: what made one slow for a while made the other so too."""
    return Figure.of([a / b for a, b in zip(over, under, strict=True)])


@dataclass(slots=True)
class Report:
    setting: dict[str, str]
    measured: list[Measured] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        raw: dict[str, Any] = json.loads(path.read_text())
        return cls(
            raw["setting"],
            [Measured(**each) for each in raw["measured"]],
            [Table(t["key"], t["title"], [Row(**row) for row in t["rows"]]) for t in raw["tables"]],
        )

    def times(self, case: str, loop: str = DEFAULT_LOOP) -> dict[str, list[float]]:
        for each in self.measured:
            if (each.key, each.loop) == (case, loop):
                return each.times
        return {}

    def row(self, table: str, what: str) -> list[float]:
        for each in self.tables:
            if each.key == table:
                return next((row.values for row in each.rows if row.what == what), [])
        return []


def markdown(report: Report) -> str:
    setting = "; ".join(f"{name}: {value}" for name, value in report.setting.items())
    parts = [textwrap.fill(f"{setting}.", 105), *_targets(report)]
    parts += map(measured_markdown, report.measured)
    parts += map(table_markdown, report.tables)
    return "\n\n".join(parts)


def measured_markdown(measured: Measured) -> str:
    others = {
        heading: measured.times[title]
        for heading, title in (
            ("of redis-py Lock's", who.REDIS_PY.title),
            ("of the raw round trips'", who.RAW.title),
        )
        if title in measured.times
    }
    headings = ["", "µs per acquire + release", "quartiles"]
    for heading in others:
        headings += [heading, "quartiles"]
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for title, times in measured.times.items():
        figure = Figure.of(times)
        row = [title, *_cells(figure, f".{_decimals(figure.median)}f")]
        for other in others.values():
            row += _cells(ratio(times, other), ".3g") if other is not times else ("1", "")
        rows.append(row)
    blank = [""] * (len(headings) - 2)
    rows += [[title, why, *blank] for title, why in measured.missing.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"### {measured.title} ({measured.loop})\n", *lines])


def table_markdown(table: Table) -> str:
    lines = [f"### {table.title}\n", "| | median | lowest to highest |", "|---|---:|---:|"]
    for row in table.rows:
        middle = statistics.median(row.values)
        form = f",.{_decimals(middle)}f"
        unit = f" {row.unit}" if row.unit else ""
        spread = f"{min(row.values):{form}} to {max(row.values):{form}}"
        lines.append(f"| {row.what} | {middle:{form}}{unit} | {spread} |")
    return "\n".join(lines)


def _cells(figure: Figure, form: str) -> tuple[str, str]:
    return f"{figure.median:{form}}", f"{figure.low:{form}} to {figure.high:{form}}"


def _decimals(value: float) -> int:
    return 0 if value >= 20 or value == int(value) else 1 if value >= 2 else 2


def fill(page: Path, text: str) -> None:
    """Put the figures where the page wants them; what people wrote around them stays."""
    before, _, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise SystemExit(f"{page} has no lines {_BEGIN!r} and {_END!r}")
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}")


@dataclass(frozen=True, slots=True)
class _Target:
    asked: str
    limit: float
    measured: float
    at_least: bool = False

    def line(self) -> str:
        met = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        off = abs(self.measured / self.limit - 1) if self.limit else 0.0
        verdict = "met" if met else f"**missed by {off:.0%}**" if self.limit else "**missed**"
        return f"| {self.asked} | {self.measured:.3g} | {verdict} |"


def _targets(report: Report) -> list[str]:
    """Hold the run against what was asked for; what was not measured is left out."""
    targets = [*_pair_targets(report), *_process_targets(report), *_load_targets(report)]
    if not targets:
        return []
    head = ["### Targets\n", "| asked | measured | |", "|---|---:|---|"]
    return ["\n".join([*head, *(target.line() for target in targets)])]


def _pair_targets(report: Report) -> Iterator[_Target]:
    ours, unconfirmed, raw = who.OURS.title, who.UNCONFIRMED.title, who.RAW.title

    def compare(case: str, one: str, other: str) -> Iterator[float]:
        times = report.times(case)
        if one in times and other in times:
            yield ratio(times[one], times[other]).median

    for case, cores in (("one-task", "two cores"), ("one-task-one-core", "one core")):
        for found in compare(case, ours, who.REDIS_PY.title):
            yield _Target(f"one task on {cores} at most 0.9 of redis-py `Lock`", 0.9, found)
        for found in compare(case, ours, raw):
            yield _Target("… and at most 1.35 of two raw round trips", 1.35, found)
        for found in compare(case, unconfirmed, who.REDIS_PY.title):
            yield _Target("… `confirm_release=False` at most 0.6 of redis-py `Lock`", 0.6, found)
        for found in compare(case, unconfirmed, who.NODE.title):
            yield _Target("… which passes node-redlock", 1.0, found)
    for found in compare("64-names", who.REDIS_PY.title, ours):
        yield _Target("64 tasks on 64 names at least 3 times redis-py `Lock`", 3, found, True)
    for found in compare("1000-names", ours, who.FEW.title):
        yield _Target("1,000 tasks on 1,000 names no slower per pair than 64 on 64", 1.0, found)
    for found in compare("16-on-one", who.REDIS_PY.title, ours):
        yield _Target("16 tasks on one name at least 20 times redis-py `Lock`", 20, found, True)
    for found in compare("16-on-one", who.FIFO.title, ours):
        yield _Target("… twice redis-fifo-lock", 2, found, True)
    for found in compare("16-on-one", who.POSTGRES.title, ours):
        yield _Target("… and ahead of PostgreSQL's advisory locks", 1, found, True)


def _process_targets(report: Report) -> Iterator[_Target]:
    def of(what: str) -> float:
        values = report.row("processes", f"{who.OURS.title}: {what}")
        return statistics.median(values) if values else 0.0

    raw = report.times("one-task").get(who.RAW.title)
    if raw is None or not of("hand-over p50"):
        return
    trip = Figure.of(raw).median / 2
    yield _Target("8 processes: p50 at most 2 raw round trips", 2, of("hand-over p50") / trip)
    yield _Target("… p99 at most 10", 10, of("hand-over p99") / trip)
    most, least = of("acquisitions of the most served"), of("acquisitions of the least served")
    yield _Target("… most served at most 1.05 of the least served", 1.05, most / least)


def _load_targets(report: Report) -> Iterator[_Target]:
    for table, what, asked, limit in (
        ("waiters", "commands per waiter and second", "waiters: commands each and second", 0.5),
        ("waiters", "connections", "… connections", 2),
        ("leases", "leases lost", "leases lost", 0),
        ("leases", "client's CPU", "… client's CPU, % of a core", 20),
        ("memory", "bytes per held name", "bytes of the server per held name", 700),
        ("memory", "bytes per waiter", "… per waiter", 700),
        ("memory", "bytes per name after its release", "… per name after its release", 200),
    ):
        values = report.row(table, what)
        if values:
            yield _Target(asked, limit, statistics.median(values))
    queue = next((table for table in report.tables if table.key == "queue"), None)
    if queue is not None:
        short, long = queue.rows[0], queue.rows[-1]
        found = statistics.median(long.values) / statistics.median(short.values)
        yield _Target(f"hand-over, {long.what} at most 1.5 of {short.what}", 1.5, found)

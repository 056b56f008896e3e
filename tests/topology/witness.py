"""A store outside of Redis that checks tokens, and a record of who was certain to hold, and when."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_SCHEMA = """
CREATE TABLE fence (token INTEGER);
INSERT INTO fence VALUES (0);
CREATE TABLE turns (began REAL, ended REAL, token INTEGER, who TEXT);
CREATE TABLE violations (what TEXT);
"""


def create(path: Path) -> None:
    """Make an empty store."""
    with sqlite3.connect(path) as db:
        db.executescript(_SCHEMA)
        db.execute("PRAGMA journal_mode=WAL")
    db.close()


class Witness:
    """One process's connection to the store."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous=OFF")

    def write(self, token: int) -> bool:
        """Write with a token; return False when a larger one has been here."""
        done = self._db.execute("UPDATE fence SET token=? WHERE token<=?", (token, token))
        return done.rowcount == 1

    def record(self, began: float, ended: float, token: int, who: str) -> None:
        """Note that ``who`` certainly held from ``began`` to ``ended``, on the machine's clock."""
        self._db.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", (began, ended, token, who))

    def violated(self, what: str) -> None:
        """Note what must never be."""
        self._db.execute("INSERT INTO violations VALUES (?)", (what,))

    def close(self) -> None:
        self._db.close()


@dataclass(frozen=True)
class Verdict:
    """What the store has seen."""

    turns: int
    overlaps: list[str]
    tokens_that_do_not_grow: list[str]
    violations: list[str]

    @property
    def all_is_well(self) -> bool:
        return not (self.overlaps or self.tokens_that_do_not_grow or self.violations)


def beginnings(path: Path) -> list[float]:
    """Return when each turn began, in order."""
    db = sqlite3.connect(path)
    began = [row[0] for row in db.execute("SELECT began FROM turns ORDER BY began")]
    db.close()
    return began


def judge(path: Path) -> Verdict:
    """Look at all turns: they must follow each other, with growing tokens."""
    db = sqlite3.connect(path)
    turns = db.execute("SELECT began, ended, token, who FROM turns ORDER BY began").fetchall()
    violations = [row[0] for row in db.execute("SELECT what FROM violations")]
    db.close()
    pairs = list(pairwise(turns))
    return Verdict(
        turns=len(turns),
        overlaps=[f"{two} began within {one}" for one, two in pairs if two[0] < one[1]],
        tokens_that_do_not_grow=[f"{two} after {one}" for one, two in pairs if two[2] <= one[2]],
        violations=violations,
    )

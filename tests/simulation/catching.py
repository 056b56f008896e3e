"""What a test asks of a broken variant: that one of its seeds is caught, by the checker that should."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from .run import run_seed
from .scenario import Simulation
from .variants import Variant


def one_of_each(variants: Mapping[str, Variant], names: Iterable[str] | None = None) -> list[Any]:
    """Return the variants as parameters: all are long but the first of each checker in each world.

    These show that each checker still looks; the others show in which ways a protocol can break.
    """
    seen: set[tuple[object, str]] = set()
    params = []
    for name in variants if names is None else names:
        variant = variants[name]
        new = {(variant.kind, checker) for checker in variant.caught_by} - seen
        seen |= new
        params.append(pytest.param(name, marks=() if new else pytest.mark.long))
    return params


def assert_caught(
    variant: Variant,
    seeds: int,
    *,
    kind: type[Simulation] | None = None,
    by: Collection[str] | None = None,
) -> None:
    """Search from its seed on, in its own world and by its own checkers unless others are given."""
    expected, others = by or variant.caught_by, []
    for seed in range(variant.seed, variant.seed + seeds):
        outcome = run_seed(seed, variant.prepare, kind or variant.kind)
        if outcome.checker in expected:
            return
        if outcome.checker:
            others.append(f"{seed}: {outcome.message}")
    raise AssertionError(f"not by {expected}, but: {others}; python -m tests.simulation --variants")

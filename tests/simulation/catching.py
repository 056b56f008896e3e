"""What a test asks of a broken variant: that one of its seeds is caught, by the checker that should."""

from __future__ import annotations

from collections.abc import Collection

from .run import run_seed
from .scenario import Simulation
from .variants import Variant


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

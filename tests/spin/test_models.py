"""The small configurations of the models: the protocols keep their promises, and old rules are refuted."""

from __future__ import annotations

from pathlib import Path

import pytest

from .configurations import CONFIGURATIONS
from .run import Configuration, check, missing

#: What takes seconds, of each model; the other small ones are long.
_QUICK = (
    "two requests, nothing fails",
    "etcd: two requests, three faults",
    "etcd: a request leaves no marker",
    "session: it lives as long as said",
)

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()} is not installed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(
            one,
            id=one.name.replace(" ", "-"),
            marks=() if one.name.startswith(_QUICK) else pytest.mark.long,
        )
        for one in CONFIGURATIONS
        if one.small
    ],
)
def test_model_holds_and_old_rules_are_refuted(
    configuration: Configuration, tmp_path: Path
) -> None:
    result = check(configuration, tmp_path, megabytes=2000, within=300.0)
    assert result.as_expected, result.counterexample or result

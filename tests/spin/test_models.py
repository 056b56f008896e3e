"""The small configurations of the models: the protocols keep their promises, and old rules are refuted."""

from __future__ import annotations

from pathlib import Path

import pytest

from .configurations import CONFIGURATIONS
from .run import Configuration, check, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()} is not installed")


@pytest.mark.parametrize(
    "configuration",
    [one for one in CONFIGURATIONS if one.small],
    ids=lambda configuration: configuration.name.replace(" ", "-"),
)
def test_model_holds_and_old_rules_are_refuted(
    configuration: Configuration, tmp_path: Path
) -> None:
    result = check(configuration, tmp_path, megabytes=2000, within=300.0)
    assert result.as_expected, result.counterexample or result

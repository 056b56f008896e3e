"""Fixtures for histories that are the same each time."""

from __future__ import annotations

import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants


@pytest.fixture
def _constants_of_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Hypothesis from trying constants that it finds in the modules of ours which happen to be
    loaded: other tests of the same process would change the histories."""
    monkeypatch.setattr(providers, "_get_local_constants", Constants)
    providers.CONSTANTS_CACHE.cache.clear()

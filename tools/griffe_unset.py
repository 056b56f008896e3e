"""Show ``timeout=...`` where the code says ``timeout=_UNSET``: a private object tells a reader nothing."""

from __future__ import annotations

from typing import Any

import griffe


class HideUnset(griffe.Extension):  # type: ignore[misc]
    """Called by mkdocstrings for each function that it has read."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            if str(parameter.default) == "_UNSET":
                parameter.default = "..."

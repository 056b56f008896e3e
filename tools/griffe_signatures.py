"""Show signatures as a reader needs them, without what the code has for itself."""

from __future__ import annotations

from typing import Any

import griffe


class PlainSignatures(griffe.Extension):  # type: ignore[misc]
    """Called by mkdocstrings for each function that it has read."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in list(func.parameters):
            # "timeout=_UNSET": a private object tells a reader nothing.
            if str(parameter.default) == "_UNSET":
                parameter.default = "..."
            # "**wrong: Never": takes what other libraries call things, to answer with our word.
            if str(parameter.annotation) == "Never":
                del func.parameters[parameter.name]

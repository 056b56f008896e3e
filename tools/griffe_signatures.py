"""Show signatures and docstrings as a reader needs them, without what the code has for itself."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import griffe


class PlainSignatures(griffe.Extension):  # type: ignore[misc]
    """Called by mkdocstrings for each function that it has read, and then for each package."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in list(func.parameters):
            # "timeout=_UNSET": a private object tells a reader nothing.
            if str(parameter.default) == "_UNSET":
                parameter.default = "..."
            # "**wrong: Never": takes what other libraries call things, to answer with our word.
            if str(parameter.annotation) == "Never":
                del func.parameters[parameter.name]

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let what is for threads show the docstrings that it has from its twins for tasks."""
        for module in pkg["sync"].modules.values():
            for kind in module.classes.values():
                if kind.docstring is None:
                    _document(kind)
                for name, method in kind.functions.items():
                    if method.docstring is None and not name.startswith("_"):
                        _document(method)


def _document(shown: griffe.Object) -> None:
    text = inspect.getdoc(pydoc.locate(shown.path))
    if text:
        shown.docstring = griffe.Docstring(text, parent=shown)

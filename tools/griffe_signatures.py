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
        """Let methods for threads show what they have from their twins for tasks."""
        for module in pkg["sync"].modules.values():
            for kind in module.classes.values():
                if kind.docstring is None:
                    _document(kind)
                for name, member in list(kind.members.items()):
                    if str(getattr(member, "value", "")).startswith("asks("):
                        kind[name] = _asked(pkg, member)
                    elif member.is_function and member.docstring is None and name[0] != "_":
                        _document(member)


def _document(shown: griffe.Object) -> None:
    text = inspect.getdoc(pydoc.locate(shown.path))
    if text:
        shown.docstring = griffe.Docstring(text, parent=shown)


def _asked(pkg: griffe.Module, attribute: griffe.Attribute) -> griffe.Function:
    """Return the method that ``asks(core.Lease.wait_lost)`` makes."""
    name, _, rest = str(attribute.value).removeprefix("asks(").rstrip(")").partition(".")
    twin = pkg[f"{attribute.module.resolve(name)}.{rest}".removeprefix(f"{pkg.path}.")]
    shown = griffe.Function(
        attribute.name, parameters=twin.parameters, returns=twin.returns, parent=attribute.parent
    )
    _document(shown)
    return shown

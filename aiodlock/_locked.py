"""Names of locks that are filled from the arguments of a call, for ``@client.locked``.

Two calls with different values never get the same name. Values are percent-encoded, and so are the
characters that separate two fields of the template, so a name can be taken apart in one way only.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from uuid import UUID

from ._options import check_text

_ALNUM = frozenset(string.ascii_letters + string.digits)
_UNRESERVED = _ALNUM | frozenset("-._~")


class CallTemplate:
    """A name with fields in it: ``"order:{order_id}"``.

    :raises TypeError: when the template is no str.
    :raises ValueError: when it cannot be a name, or two values could run into each other.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"the template of a lock's name must be a str, not {text!r}")
        self.text = text
        self._literals, self._fields = take_apart(text)
        for field in self._fields:
            if not field.isidentifier():
                raise ValueError(f"{text!r}: {{{field}}} is not the name of a parameter")
        check_text(
            "the template of a lock's name", "".join(self._literals) or "-" * len(self._fields)
        )
        between = self._literals[1:-1]
        for literal in between:
            if not set(literal) - _ALNUM - {"%"}:
                raise ValueError(f"{text!r}: put a separator, such as ':', between two fields")
        self._kept = _ALNUM | (_UNRESERVED - set("".join(between)))

    def of(self, function: Callable[..., Any]) -> Callable[..., str]:
        """Return what makes the name out of a call's arguments, defaults applied.

        :raises ValueError: when a field is not a parameter of the function.
        """
        signature = inspect.signature(function)
        for field in self._fields:
            parameter = signature.parameters.get(field)
            if parameter is None or parameter.kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                raise ValueError(
                    f"{self.text!r}: {{{field}}} is not a parameter of {_name_of(function)}{signature}"
                )
        if not self._fields:
            return lambda *args, **kwargs: "".join(self._literals)

        def name(*args: Any, **kwargs: Any) -> str:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self._fill(bound.arguments)

        return name

    def _fill(self, arguments: Mapping[str, Any]) -> str:
        return filled(
            self._literals, [self._encoded(field, arguments[field]) for field in self._fields]
        )

    def _encoded(self, field: str, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | UUID):
            raise TypeError(
                f"{self.text!r}: {field} must be a str, an int or a UUID to be part of a lock's name, not "
                f"{value!r}"
            )
        if isinstance(value, str):
            text = str.__str__(value)
        else:
            text = str(int(value)) if isinstance(value, int) else str(value)
        kept = self._kept
        return "".join(char if char in kept else _percent(char) for char in text)


def take_apart(text: str) -> tuple[list[str], list[str]]:
    """Return the literals of a template, and the fields between them: one less.

    :raises ValueError: when braces do not match, and for a field with a format or a conversion.
    """
    literals: list[str] = [""]
    fields: list[str] = []
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as wrong:
        raise ValueError(f"{text!r} is no template of a lock's name: {wrong}") from None
    for literal, field, form, conversion in parsed:
        # A literal ends also behind an escaped brace, where no field follows.
        literals[-1] += literal
        if field is None:
            continue
        if form or conversion:
            raise ValueError(f"{text!r}: a field takes no format and no conversion")
        fields.append(field)
        literals.append("")
    return literals, fields


def filled(literals: Sequence[str], values: Sequence[str]) -> str:
    """Return a template with values in its fields; both are as of ``take_apart``."""
    return "".join(map("".join, zip_longest(literals, values, fillvalue="")))


def check_function(function: object, *, coroutine: bool, instead: str) -> None:
    """Refuse what a lock cannot be held around.

    :param coroutine: whether it must be an ``async def``, or must not.
    :param instead: what to use for the other kind.
    """
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"put the decorator below @{type(function).__name__}, next to the function")
    if not callable(function):
        raise TypeError(f"a function is needed, not {function!r}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{_name_of(function)} is a generator: its body runs only while somebody iterates, so hold the "
            "lock inside of it"
        )
    if inspect.iscoroutinefunction(function) != coroutine:
        kind = "not async" if coroutine else "async"
        raise TypeError(f"{_name_of(function)} is {kind}: use {instead}")


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)

"""The twin of a class for threads is the one for tasks: types and docstrings stand once, there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Twin = TypeVar("_Twin")

#: How the same is said of threads.
_SAID = (
    (re.compile(r"\basync (?=with|for|def|function)"), ""),
    (re.compile(r"\ban (?=function)"), "a "),
    (re.compile(r"\bawait "), ""),
    (re.compile(r"\bclient\.(?=\w)"), "locks."),
    (re.compile(r"\baiodlock\.(?=[A-Z])"), "sync."),
    (re.compile(r"\b(a?)task(s?)\b"), r"\1thread\2"),
)


def asks(
    method: Callable[Concatenate[_Twin, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Any, _P], _T]:
    """Return the method for threads: the loop runs the coroutine of the twin, and the thread waits for it.

    Its class says by ``_ask`` which twin that is.
    """

    def asked(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        answer: _T = self._ask(lambda twin: method(twin, *args, **kwargs))
        return answer

    asked.__name__, asked.__qualname__ = method.__name__, method.__qualname__
    asked.__annotations__ = inspect.get_annotations(method)
    asked.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return like(method)(asked)


def like(twin: object) -> Callable[[_F], _F]:
    """Let a method or class have the docstring of its twin, said of threads."""

    def with_docstring(own: _F) -> _F:
        own.__doc__ = said_of_threads(twin)
        return own

    return with_docstring


def said_of_threads(twin: object) -> str:
    """Return the docstring, without ``await``."""
    text = inspect.getdoc(twin) or ""
    for word, instead in _SAID:
        text = word.sub(instead, text)
    return text

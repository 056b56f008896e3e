"""The twin of a class for threads is the one for tasks. What is the same is described once, there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

#: How the same is said of threads.
_SAID = (
    (re.compile(r"\basync (?=with|for|def|function)"), ""),
    (re.compile(r"\ban (?=function)"), "a "),
    (re.compile(r"\bawait "), ""),
    (re.compile(r"\bclient\.(?=\w)"), "locks."),
    (re.compile(r"\baiodlock\.(?=[A-Z])"), "sync."),
    (re.compile(r"\b(a?)task(s?)\b"), r"\1thread\2"),
)


def like(twin: object) -> Callable[[_F], _F]:
    """Let a method have the docstring of its twin, said of threads."""

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

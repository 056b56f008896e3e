"""``@client.locked`` and ``@client.once_per``: a call's name, and which functions they take."""

from __future__ import annotations

import functools
import inspect
from asyncio import Future
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
)
from concurrent.futures import Future as ThreadFuture
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager
from typing import Any, ParamSpec, TypeAlias, TypeVar

from ._lock import Lock
from ._naming import Template
from ._once import Once, recordable

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Function: TypeAlias = Callable[_P, Coroutine[Any, Any, _T]]
#: What a function may return that runs, or lets run, only when the function has returned.
_LATER: Mapping[str, tuple[type, ...]] = {
    "an awaitable": (Awaitable, Future),
    "a future": (ThreadFuture,),
    "a generator": (Generator, AsyncGenerator, AsyncIterator),
    "a context manager": (_GeneratorContextManager, _AsyncGeneratorContextManager),
}
_CLOSED_BY: Mapping[str, tuple[type, ...]] = {
    "close": (Coroutine, Generator),
    "cancel": (Future, ThreadFuture),
}


def held_around(
    template: str, lock_of: Callable[[str], Lock]
) -> Callable[[_Function[_P, _T]], _Function[_P, _T]]:
    """As ``Client.locked``."""
    parsed = CallTemplate(template)

    def decorate(function: _Function[_P, _T]) -> _Function[_P, _T]:
        name_of = parsed.of(function, coroutine=True, instead="aiodlock.sync.Client.locked")

        @functools.wraps(function)
        async def locked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            async with lock_of(name_of(*args, **kwargs)):
                return await function(*args, **kwargs)

        return locked

    return decorate


def done_once(
    template: str, once_of: Callable[[str], Once]
) -> Callable[[_Function[_P, _T]], _Function[_P, _T | str | bytes | None]]:
    """As ``Client.once_per``."""
    parsed = CallTemplate(template)

    def decorate(function: _Function[_P, _T]) -> _Function[_P, _T | str | bytes | None]:
        name_of = parsed.of(function, coroutine=True, instead="aiodlock.sync.Client.once_per")

        @functools.wraps(function)
        async def once_per(*args: _P.args, **kwargs: _P.kwargs) -> _T | str | bytes | None:
            async with once_of(name_of(*args, **kwargs)) as once:
                if not once.first:
                    return once.result
                result = await function(*args, **kwargs)
                once.result = recordable(result)
                return result

        return once_per

    return decorate


class CallTemplate:
    """A name that is filled from the arguments of a call: ``"order:{order_id}"``.

    :raises TypeError: when the template is no str.
    :raises ValueError: when it cannot be a name, or two values could run into each other.
    """

    def __init__(self, text: str) -> None:
        self._template = Template(text)
        for field in self._template.fields:
            if not field.text.isidentifier():
                raise ValueError(f"{text!r}: {{{field.text}}} is not the name of a parameter")

    def of(
        self, function: Callable[..., Any], *, coroutine: bool, instead: str
    ) -> Callable[..., str]:
        """Return what makes the name out of a call's arguments, defaults applied.

        :param coroutine: whether the function must be an ``async def``, or must not.
        :param instead: what to use for the other kind.
        :raises TypeError: when a lock cannot be held around the function.
        :raises ValueError: when a field is not a parameter of the function.
        """
        _check_function(function, coroutine, instead)
        signature = inspect.signature(function)
        fields = [field.name for field in self._template.fields]
        for field in fields:
            parameter = signature.parameters.get(field)
            if parameter is None or parameter.kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                raise ValueError(
                    f"{self._template.text!r}: {{{field}}} is not a parameter of "
                    f"{_name_of(function)}{signature}"
                )
        if not fields:
            always = self._template.fill(())
            return lambda *args, **kwargs: always

        def name(*args: Any, **kwargs: Any) -> str:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self._template.fill([bound.arguments[field] for field in fields])

        return name


def _check_function(function: object, coroutine: bool, instead: str) -> None:
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


def check_returned(function: object, returned: _T) -> _T:
    """Refuse, and close, what runs only later: a coroutine, a generator, a future, a context manager.

    :raises TypeError: the lock would be released before that runs.
    """
    what = next((what for what, kind in _LATER.items() if isinstance(returned, kind)), None)
    if what is None:
        return returned
    _close(returned)
    raise TypeError(
        f"{_name_of(function)} has returned {what} ({type(returned).__qualname__}), which would run "
        "when the lock is released already; nothing was recorded. Around an async function, also one "
        "that a plain decorator has wrapped, use aiodlock.Client with 'async with' inside of it; around a "
        "generator or a context manager, use 'with' inside of it"
    )


def _close(returned: Any) -> None:
    if isinstance(returned, AsyncGenerator):
        return  # that was never begun: there is nothing to close
    for name in ("close", "cancel"):
        close = getattr(returned, name, None)
        if isinstance(returned, _CLOSED_BY[name]) and callable(close):
            close()


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)

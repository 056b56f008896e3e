"""The public names and their signatures are those that ``public_api.txt`` lists: no change by accident.

A change on purpose: ``python -m tests.unit.test_public_api`` writes the list anew; its difference belongs
into the same commit, and into the changelog.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path

LIST = Path(__file__).with_name("public_api.txt")
#: By methods of others: how they are made is nobody's business.
NOT_MADE_BY_USERS = (
    *("Election", "Lease", "Lock", "MultiLease", "MultiLock", "Once", "ReadWriteLock", "Semaphore"),
    *("HolderInfo", "LockInfo", "OnceRun", "RecordedInfo", "RequestInfo", "WaiterInfo"),
)
MODULES = (
    *("aiodlock", "aiodlock.fastapi", "aiodlock.fencing", "aiodlock.otel", "aiodlock.sync"),
    *("aiodlock.testing", "aiodlock.web"),
)


def public_api() -> str:
    """Return everything that users may rely on, a line each."""
    return "".join(f"{line}\n" for module in MODULES for line in _of_module(module))


def _of_module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    names: list[str] = vars(module).get("__all__") or [
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and getattr(value, "__module__", "").startswith("aiodlock")
    ]
    for public in sorted(names):
        yield from _of_value(f"{name}.{public}", getattr(module, public))


def _of_value(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _of_class(name, value)
    elif inspect.isroutine(value):
        yield _call(name, value)
    else:
        yield f"{name}: {type(value).__name__.lstrip('_')}"


def _of_class(name: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__)
    yield f"class {name}({bases})"
    made = cls.__name__ not in NOT_MADE_BY_USERS
    if made and not issubclass(cls, Exception):
        yield _call(name, cls)
    own = vars(cls).get("__dataclass_fields__", {})
    yield from (f"{name}.{field}: {about.type}" for field, about in own.items())
    said = {} if own else inspect.get_annotations(cls)
    yield from (
        f"{name}.{field}: {_plain(what)}" for field, what in said.items() if field[0] != "_"
    )
    members: dict[str, object] = {}
    for base in reversed([base for base in cls.__mro__ if base.__module__.startswith("aiodlock")]):
        members.update(vars(base))
    for member, value in sorted(members.items()):
        if isinstance(value, property) and not member.startswith("_"):
            yield f"{name}.{member}: {inspect.signature(value.fget or repr).return_annotation}"
        elif isinstance(value, types.FunctionType) and (
            not member.startswith("_") or member in ("__aenter__", "__aiter__")
        ):
            yield _call(f"{name}.{member}", value)


def _call(name: str, value: Callable[..., object]) -> str:
    word = "async " if inspect.iscoroutinefunction(value) else ""
    return f"{word}{name}{_signature(value)}"


class _Bare(str):
    """An annotation that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Callable[..., object]) -> str:
    signature = inspect.signature(value)
    parameters = []
    for parameter in signature.parameters.values():
        if isinstance(parameter.annotation, str):
            parameter = parameter.replace(annotation=_Bare(parameter.annotation))
        default = parameter.default
        if default is not inspect.Parameter.empty and not _is_plain(default):
            parameter = parameter.replace(default=_Bare("..."))
        parameters.append(parameter)
    result = signature.return_annotation
    return str(
        signature.replace(
            parameters=parameters,
            return_annotation=_Bare(result) if isinstance(result, str) else result,
        )
    )


def _plain(annotation: object) -> str:
    """Return an annotation as it was written."""
    return getattr(annotation, "__forward_arg__", None) or str(annotation)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def test_public_names_and_signatures_are_the_listed_ones() -> None:
    listed, found = LIST.read_text().splitlines(), public_api().splitlines()
    assert found == listed, "see the docstring of this file"


if __name__ == "__main__":
    LIST.write_text(public_api())

"""The reference as markdown, for the pages in the repository: signatures, and what docstrings say.

The site has the same from mkdocstrings, with links between the names: ``docs_hooks`` asks for that instead.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any

_FIELD = re.compile(r"^:(param|raises|returns?)\b\s*([^:]*):\s*", re.MULTILINE)
#: What docstrings say to who reads the code.
_INSIDE = re.compile(r"\n\nMutable state: .*?(?=\n\n|\Z)", re.DOTALL)
_WORDS = {"raises": "Raises", "return": "Returns", "returns": "Returns"}
#: Lines of a signature are no longer than this.
_WIDTH = 100


def described(path: str, *, bare: bool = False) -> str:
    """Return the section about the class or function of this dotted name.

    :param bare: leave out how it is constructed: users get it from elsewhere.
    """
    named = _resolve(path)
    anchor = f'<a id="{path}"></a>'
    name = path.removeprefix("aiodlock.") if path.count(".") > 1 else path.rpartition(".")[2]
    last = path.rpartition(".")[2]
    parts = [anchor, f"## {name}"]
    said = _said_below(last, named)
    if said is not None:
        parts += _prose(said)
    else:
        parts += _prose(inspect.getdoc(named)) if bare else _about(last, named)
    if inspect.isclass(named):
        for member, value in _attributes_first(named):
            parts += [f'<a id="{path}.{member}"></a>', f"### {member}", *_about(member, value)]
    return "\n\n".join(parts)


def _resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _said_below(name: str, value: Any) -> str | None:
    """Return the text below the assignment of a module's variable; None for a class or function."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return None
    for module in tuple(sys.modules.values()):
        if module.__name__.partition(".")[0] != "aiodlock" or vars(module).get(name) is not value:
            continue
        body = ast.parse(inspect.getsource(module)).body
        for assigned, below in itertools.pairwise(body):
            if (
                isinstance(assigned, ast.AnnAssign)
                and isinstance(assigned.target, ast.Name)
                and assigned.target.id == name
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                return inspect.cleandoc(str(below.value.value))
    return None


def _about(name: str, value: Any) -> list[str]:
    if isinstance(value, property | cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        returned = inspect.signature(getter).return_annotation if getter else ""
        return [_fenced(f"{name}: {_annotation(returned)}"), *_prose(inspect.getdoc(value))]
    if inspect.isclass(value):
        return [_fenced(_class(name, value)), *_prose(inspect.getdoc(value))]
    function = inspect.unwrap(getattr(value, "__func__", value))
    if not callable(function):
        return _prose(inspect.getdoc(value))
    return [_fenced(_function(name, function)), *_prose(inspect.getdoc(function))]


def _class(name: str, value: type) -> str:
    if is_dataclass(value):
        return f"class {name}:\n{textwrap.indent(_fields(value), '    ')}"
    bases = ", ".join(one.__name__ for one in value.__bases__ if _is_shown(one))
    # What has no way in of its own is made by others: an error by us, a lease by a lock.
    parameters = _parameters(vars(value)["__init__"]) if "__init__" in vars(value) else []
    called = _wrapped(f"{name}(", parameters, ")") if parameters else name
    return f"class {called}" if parameters or not bases else f"class {name}({bases})"


def _is_shown(base: type) -> bool:
    return base is not object and not base.__name__.startswith("_") and base.__module__ != "typing"


def _fields(value: type) -> str:
    """Return the fields of a dataclass as they stand in its source, with the comments between them."""
    source = textwrap.dedent(inspect.getsource(value))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    fields = [one for one in tree.body if isinstance(one, ast.AnnAssign)]
    lines = source.splitlines()
    first = fields[0].lineno - 1
    while lines[first - 1].strip().startswith("#:"):
        first -= 1
    return textwrap.dedent("\n".join(lines[first : fields[-1].end_lineno]))


def _function(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    word = "async def" if inspect.iscoroutinefunction(function) else "def"
    returned = signature.return_annotation
    end = ")" if returned is inspect.Signature.empty else f") -> {_annotation(returned)}"
    return _wrapped(f"{word} {name}(", _parameters(function), end)


def _parameters(function: Callable[..., Any]) -> list[str]:
    shown: list[str] = []
    marked = False
    for parameter in inspect.signature(function).parameters.values():
        # "**wrong: Never" takes what other libraries call things, to answer with our word.
        if parameter.name in ("self", "cls") or parameter.annotation == "Never":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            marked = True
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            shown.append("*")
            marked = True
        shown.append(_parameter(parameter))
    return shown


def _parameter(parameter: inspect.Parameter) -> str:
    kinds: dict[object, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    stars = kinds.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        # A private object, such as that of "timeout=_UNSET", tells a reader nothing.
        plain = isinstance(parameter.default, str | int | float | tuple | type(None))
        text += f" = {parameter.default!r}" if plain else " = ..."
    return text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _wrapped(head: str, parameters: list[str], tail: str) -> str:
    line = head + ", ".join(parameters) + tail
    if len(line) <= _WIDTH:
        return line
    return head + "\n" + "".join(f"    {one},\n" for one in parameters) + tail


def _fenced(code: str) -> str:
    return f"```py\n{code}\n```"


def _attributes_first(owner: type) -> list[tuple[str, Any]]:
    """Give the public members: what a base tells belongs in front of what its class does."""
    kinds = property, cached_property
    return sorted(_members(owner), key=lambda member: not isinstance(member[1], kinds))


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Give the public members in the order of the source, a base's after those of its class."""
    seen: set[str] = set()
    for one in owner.__mro__:
        if one.__module__.partition(".")[0] != "aiodlock":
            continue
        fields = set(inspect.get_annotations(one)) if is_dataclass(one) else set()
        for name, value in vars(one).items():
            if name.startswith("_") or name in seen | fields:
                continue
            seen.add(name)
            if isinstance(value, property | cached_property) or callable(
                getattr(value, "__func__", value)
            ):
                yield name, value


def _prose(doc: str | None) -> list[str]:
    """Return a docstring with Sphinx's fields as markdown."""
    if not doc:
        return []
    text = re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", _INSIDE.sub("", doc))
    first = _FIELD.search(text)
    body, fields = (text, "") if first is None else (text[: first.start()], text[first.start() :])
    parts = [body.strip()] if body.strip() else []
    if fields:
        parts.append(
            "\n".join(
                _field(one) for one in re.split(r"^(?=:\w)", fields, flags=re.MULTILINE) if one
            )
        )
    return parts


def _field(text: str) -> str:
    found = _FIELD.match(text)
    assert found is not None, text
    said = " ".join(text[found.end() :].split())
    if found[1] == "param":
        return f"- `{found[2].strip()}`: {said}"
    what = f" `{found[2].strip()}`" if found[2].strip() else ""
    return f"- {_WORDS[found[1]]}{what}{':' if found[1] != 'raises' else ''} {said}".rstrip()

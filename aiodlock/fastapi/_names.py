"""A lock's name out of a template and a request: which parameter a field means, and its value as declared.

One search finds the parameter: when the app starts, to refuse what no request could fill, and for each
request. FastAPI's own functions read the value, so the name gets what the handler gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastapi import Cookie, Header, Path, Query, Request, UploadFile, params
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import (
    request_body_to_args,
    request_params_to_args,
    solve_dependencies,
)
from pydantic import AliasChoices, BaseModel
from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection

from .._naming import PLACES, TEXTS, Field, Template, text_of
from ._handlers import route_of
from ._problems import NameRefused

#: What FastAPI takes for the body of a request that has none: None in some versions.
_NO_BODY = inspect.signature(solve_dependencies).parameters["body"].default
#: Types of which no value is one text.
_SEVERAL = (list, tuple, set, frozenset, dict, bytes, BaseModel, UploadFile)
#: Types whose values are written in more than one way; ``aiodlock.name`` refuses them, too.
_NO_ONE_TEXT = (bool, float)
#: Of these, an annotation does not tell what a value is.
_ANYTHING = (object, Any)


def marker(field: Field) -> Any:
    """Return what shows a field with a place in the OpenAPI schema, and refuses a request without it."""
    match field.place:
        case "path":
            return Path(alias=field.name)
        case "query":
            return Query(alias=field.name)
        case "header":
            return Header(alias=_as_header(field.name))
        case "cookie":
            return Cookie(alias=field.name)
    return None  # a marker for a body would change how FastAPI reads the others


class RequestTemplate(Template):
    """A lock's name with fields that a request fills."""

    def bind(self, dependant: Dependant | None, in_path: Collection[str]) -> list[_Source]:
        """Find the parameters that the fields mean.

        :param dependant: the handler of the route, with its dependencies.
        :param in_path: the fields of the route's whole path.
        :raises ValueError: when there is none for a field, more than one, or one that holds several values.
        """
        return [self._source(field, dependant, in_path) for field in self.fields]

    def _source(
        self, field: Field, dependant: Dependant | None, in_path: Collection[str]
    ) -> _Source:
        places = (field.place,) if field.place else PLACES
        found = {
            place: declared
            for place in places
            if (declared := list(_declarations(dependant, place, field.name)))
        }
        in_paths = found.pop("path", [])
        if "path" in places and (field.name in in_path or not all(one.is_ours for one in in_paths)):
            return _checked(_Source(field, "path", in_paths))
        if not found:
            handler = getattr(getattr(dependant, "call", None), "__name__", None)
            raise ValueError(
                f"neither the path nor the handler {handler!r} has the parameter {field.text!r}: declare "
                f"it in the handler (one with an alias counts under that), or write {{query.{field.name}}} "
                f"or {{header.{field.name}}}"
            )
        if len(found) > 1:
            raise ValueError(
                f"{field.name!r} is a parameter of the {' and the '.join(found)}: write which, such as "
                f"{{{next(iter(found))}.{field.name}}}"
            )
        ((place, declared),) = found.items()
        source = _checked(_Source(field, place, declared))
        if place == "body" and len({one.parameter.name for one in declared}) > 1:
            raise ValueError(f"more than one part of the body has the field {field.name!r}")
        return source

    def _bound(self, route: Any, in_path: Collection[str]) -> list[_Source]:
        """Find the parameters once per route, which keeps them: that is dearer than to read the values."""
        if route is None:
            return self.bind(None, in_path)
        bound: dict[object, list[_Source]] = route.__dict__.setdefault("aiodlock_sources", {})
        key = (self, tuple(in_path))
        if key not in bound:
            bound[key] = self.bind(getattr(route, "dependant", None), in_path)
        return bound[key]

    def has_header(self, name: str) -> bool:
        """Return whether a field can be this header."""
        return any(
            field.place in ("", "header") and _as_header(field.name) == name
            for field in self.fields
        )

    async def name(self, connection: HTTPConnection) -> str:
        """Return the name for a request.

        :raises NameRefused: when a value is missing, empty, given twice or not valid.
        :raises RuntimeError: when no request of this route could have a name.
        """
        route = route_of(connection)
        try:
            sources = self._bound(route, connection.path_params)
        except ValueError as error:  # of an app that never started
            raise RuntimeError(f"{self.text!r}: {error}") from error
        embeds = getattr(route, "_embed_body_fields", False)
        try:
            return self.fill([await source.text(connection, embeds) for source in sources])
        except ValueError as error:
            raise NameRefused(f"The parameters cannot be part of a lock's name: {error}") from error


@dataclass(frozen=True)
class _Declared:
    """A parameter that some function of the route declares, or a field of a model that is one."""

    dependant: Dependant
    place: str
    parameter: Any  # FastAPI's ModelField
    attribute: str | None
    annotation: Any

    @property
    def is_ours(self) -> bool:
        """Whether a template has declared it, which knows no type."""
        return hasattr(self.dependant.call, "names_a_lock")

    def check(self) -> None:
        """Raise ValueError for a parameter that does not hold one value, or one without one text."""
        name, kinds = self.attribute or self.parameter.alias, _kinds(self.annotation)
        for kind in kinds:
            why = None
            if issubclass(kind, _SEVERAL) and len(kinds) == 1:
                why = "is not one value"
            elif str not in kinds and (
                issubclass(kind, _NO_ONE_TEXT) or (_has_no_text(kind) and not self._is_validated)
            ):
                why = "cannot be part of a lock's name: declare a str, an int or a Decimal"
            if why is not None:
                raise ValueError(f"the parameter {name!r} is a {kind.__name__}, which {why}")

    @property
    def _field(self) -> Any:
        """Pydantic's description of it."""
        if self.attribute is None:
            return self.parameter.field_info
        model = _model_of(self.parameter)
        assert model is not None
        return model.model_fields[self.attribute]

    @property
    def _is_validated(self) -> bool:
        """Whether the application's own functions see it first, and may make a str of it."""
        if any(map(_is_hook, self._field.metadata)) or _has_hook(self._field.annotation):
            return True
        model = _model_of(self.parameter) if self.attribute is not None else None
        if model is None:
            return False
        own = model.__pydantic_decorators__
        return bool(own.field_validators or own.model_validators or own.validators)

    def keys(self) -> set[str]:
        """Return under which names a request can have the value."""
        return _keys(self.attribute or self.parameter.name, self._field)

    async def value(self, connection: HTTPConnection, embeds: bool) -> object:
        """Return the value as FastAPI hands it to who declares it; None if the request has none."""
        declared = getattr(self.dependant, f"{self.place}_params")
        if self.place == "body":
            if not isinstance(connection, Request):
                return None  # a WebSocket has no body
            is_form = isinstance(declared[0].field_info, params.Form)
            values, _ = await request_body_to_args(
                body_fields=declared,
                received_body=await (connection.form() if is_form else _json(connection)),
                embed_body_fields=embeds,
            )
        else:
            values, _ = request_params_to_args(declared, _received(connection, self.place))
        if self.parameter.name not in values:
            raise NameRefused(f"The parameter {self.parameter.alias!r} is not valid.")
        value = values[self.parameter.name]
        return value if self.attribute is None else getattr(value, self.attribute, None)


@dataclass(frozen=True)
class _Source:
    """Where the value of a field comes from."""

    field: Field
    place: str
    declared: list[_Declared]

    async def text(self, connection: HTTPConnection, embeds: bool) -> str:
        raw = self._raw(connection)
        # A template's own declaration knows no type: it counts where there is no other.
        declared = [one for one in self.declared if not one.is_ours]
        values = [await one.value(connection, embeds) for one in declared]
        texts = {self._text(value) for value in values or [raw] if value is not None}
        if len(texts) > 1 and raw is not None:
            # Who takes the text as it came says nothing about which texts are one value.
            texts.discard(self._text(raw))
        if not texts:
            raise NameRefused(f"The parameter {self.field.name!r} is missing.")
        if len(texts) > 1:
            raise NameRefused(f"The parameter {self.field.name!r} is read in different ways.")
        (text,) = texts
        if not text:
            raise NameRefused(f"The parameter {self.field.name!r} is empty.")
        return text

    def _text(self, value: object) -> str:
        what = f"the parameter {self.field.name!r}"
        if isinstance(
            value, _NO_ONE_TEXT
        ):  # as a path's own converter gives it: nothing declares the type
            raise NameRefused(
                f"{what} is a {type(value).__name__}, which cannot be part of a lock's name"
            )
        return text_of(what, value)

    def _raw(self, connection: HTTPConnection) -> object:
        """Return the value as it came, where it is one text.

        :raises NameRefused: when it is given more than once: two readers could take different ones.
        """
        if self.place == "body":
            return None
        found = self._given(connection)
        if len(found) > 1:
            raise NameRefused(f"The parameter {self.field.name!r} is given more than once.")
        return found[0] if found else None

    def _given(self, connection: HTTPConnection) -> list[Any]:
        keys = {self.field.name}.union(*(one.keys() for one in self.declared))
        if self.place == "header":
            keys = {key.lower() for key in keys} | {_as_header(key) for key in keys}
        received = _received(connection, self.place)
        if isinstance(received, Headers | QueryParams):
            return [value for key in keys for value in received.getlist(key)]
        return [received[key] for key in keys if key in received]


def _checked(source: _Source) -> _Source:
    for declared in source.declared:
        declared.check()
    return source


def _received(connection: HTTPConnection, place: str) -> Any:
    match place:
        case "path":
            return connection.path_params
        case "query":
            return connection.query_params
        case "header":
            return connection.headers
    return connection.cookies


async def _json(request: Request) -> Any:
    try:
        return await request.json() if await request.body() else _NO_BODY
    except ValueError as error:
        raise NameRefused("The body is no JSON.") from error


def _declarations(dependant: Dependant | None, place: str, name: str) -> Iterator[_Declared]:
    """Find who declares a parameter: the handler, and the dependencies below it."""
    if dependant is None:
        return
    for parameter in getattr(dependant, f"{place}_params"):
        model = _model_of(parameter)
        if model is None:
            if _is_one_of(name, _keys(parameter.name, parameter.field_info), place):
                yield _Declared(dependant, place, parameter, None, parameter.field_info.annotation)
            continue
        about = model.model_fields
        attributes = [key for key in about if _is_one_of(name, _keys(key, about[key]), place)]
        for attribute in attributes or [key for key in about if key == name]:
            yield _Declared(dependant, place, parameter, attribute, about[attribute].annotation)
    for inner in dependant.dependencies:
        yield from _declarations(inner, place, name)


def _keys(name: str, about: Any) -> set[str]:
    """Return under which names a request can have a parameter, or a field of a model."""
    alias = about.validation_alias
    if isinstance(alias, AliasChoices):
        return {choice for choice in alias.choices if isinstance(choice, str)}
    return {alias if isinstance(alias, str) else about.alias or name}


def _is_one_of(name: str, keys: set[str], place: str) -> bool:
    if place == "header":
        return _as_header(name) in map(_as_header, keys)
    return name in keys


def _as_header(name: str) -> str:
    return name.replace("_", "-").lower()


def _model_of(parameter: Any) -> type[BaseModel] | None:
    kind = _plain(parameter.field_info.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kinds(annotation: Any) -> list[type]:
    """Return the types that a value can have, as far as the annotation tells; None is none."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for one in get_args(annotation) if one is not NoneType for kind in _kinds(one)]
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    kind = getattr(annotation, "__supertype__", None)  # a NewType's
    if kind is not None:
        return _kinds(kind)
    kind = get_origin(annotation) or annotation
    return [kind] if isinstance(kind, type) else []


def _has_no_text(kind: type) -> bool:
    """Return whether no value of this type can stand in a name."""
    told = (*TEXTS, Enum)
    # Pydantic makes of a type with a hook what the hook says: of EmailStr a str.
    return not (
        issubclass(kind, told) or kind in _ANYTHING or hasattr(kind, "__get_pydantic_core_schema__")
    )


def _has_hook(annotation: Any) -> bool:
    """Return whether the annotation names a validator: where FastAPI leaves it, its versions differ."""
    return any(map(_is_hook, getattr(annotation, "__metadata__", ()))) or any(
        map(_has_hook, get_args(annotation))
    )


def _is_hook(metadata: object) -> bool:
    return hasattr(metadata, "__get_pydantic_core_schema__")


def _plain(annotation: Any) -> Any:
    """Return what an optional type is besides None."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        if len(kinds) == 1:
            return kinds[0]
    return annotation

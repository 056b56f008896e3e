"""A lock's name out of a template and a request, so that no value can name another's lock."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from fastapi import Header, Path, Query
from starlette.requests import HTTPConnection

from .._locked import filled, take_apart
from .._options import LONGEST_NAME, check_text
from ._problems import NameRefused

#: What a value may consist of: nothing that separates the parts of a name, or matches others.
_SAFE_VALUE = re.compile(r"[\w.~@+=,-]+")


class _Field:
    """One field of a template: where its value comes from, and how to get it."""

    def __init__(self, text: str) -> None:
        place, dot, name = text.partition(".")
        if not dot:
            place, name = "", text
        if place not in ("", "path", "query", "header") or not re.fullmatch(r"[\w-]+", name):
            raise ValueError(
                f"{{{text}}} names no parameter: write {{name}}, {{path.name}}, {{query.name}} or "
                "{header.name}"
            )
        self.place, self.name = place, name
        self.header = name.replace("_", "-").lower()

    def marker(self) -> Any:
        """Return what shows the field in the OpenAPI schema and refuses its absence."""
        match self.place:
            case "path":
                return Path(alias=self.name)
            case "query":
                return Query(alias=self.name)
            case "header":
                return Header(alias=self.header)
        return None

    def is_told_by(self, known: dict[str, set[str]]) -> bool:
        """Return whether a request can fill it, given what its route and handler read."""
        if self.place in ("query", "header"):
            return True  # the marker reads it
        if self.name in known["path"]:
            return True
        if self.place == "path":
            return False
        return self.name in known["query"] or self.header in known["header"]

    def value(self, connection: HTTPConnection) -> str:
        if self.place in ("", "path") and self.name in connection.path_params:
            return self._as_handled(connection, "path", str(connection.path_params[self.name]))
        found: list[tuple[str, str]] = []
        if self.place in ("", "query"):
            values = connection.query_params.getlist(self.name)
            found += [("query", value) for value in values]
        if self.place in ("", "header"):
            values = connection.headers.getlist(self.header)
            found += [("header", value) for value in values]
        if not found:
            raise NameRefused(f"The parameter {self.name!r} is missing.")
        if len(found) > 1:
            # Two readers could take different ones.
            raise NameRefused(f"The parameter {self.name!r} is given more than once.")
        return self._as_handled(connection, *found[0])

    def _as_handled(self, connection: HTTPConnection, place: str, raw: str) -> str:
        """Return the value as the handler's own parameter of that name will have it."""
        dependant = getattr(connection.scope.get("route"), "dependant", None)
        alias = self.header if place == "header" else self.name
        for field in getattr(dependant, f"{place}_params", ()):
            if field.alias.lower() == alias.lower():
                value, errors = field.validate(raw, {}, loc=(place, alias))
                if errors:
                    raise NameRefused(f"The parameter {self.name!r} is not valid.")
                if isinstance(value, Enum):
                    value = value.value
                if not isinstance(value, list | tuple | set | dict):
                    return str(value)
        return raw


class Template:
    """A lock's name with fields in it."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"name_template must be a str, not {text!r}")
        if not text:
            raise ValueError("name_template must not be empty")
        self.text = text
        self.literals, fields = take_apart(text)
        self.fields = [_Field(field) for field in fields]
        check_text("name_template", "".join(self.literals) or "a field")
        between = self.literals[1:-1]
        for literal in between:
            if not re.search(r"\W", literal):
                raise ValueError(f"{text!r}: put a separator, such as ':', between two fields")
        #: What separates fields may not be part of one.
        self.separators = set(re.sub(r"\w", "", "".join(between)))

    def fill(self, connection: HTTPConnection) -> str:
        values = [self._safe(field, field.value(connection)) for field in self.fields]
        name = filled(self.literals, values)
        if len(name.encode()) > LONGEST_NAME:
            raise NameRefused("The parameters are too long for a lock's name.")
        return name

    def _safe(self, field: _Field, value: str) -> str:
        if not value:
            raise NameRefused(f"The parameter {field.name!r} is empty.")
        if not _SAFE_VALUE.fullmatch(value) or self.separators & set(value):
            raise NameRefused(
                f"The parameter {field.name!r} has characters that no lock's name may get from outside."
            )
        return value

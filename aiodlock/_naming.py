"""Names out of templates, by one rule for ``@client.locked``, ``once_per``, ``Locked`` and ``Once``.

A value stands in the name as text (an int in plain decimals). In that text, ``%`` and the punctuation that
the template itself has are percent-encoded, and nothing else. Two fields have punctuation between them. So
a name can be taken apart in one way only: two different calls never share one. And where a value has no
such character, the name is what an f-string would make of it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from itertools import zip_longest
from uuid import UUID

from ._options import LONGEST_NAME, check_text

#: The places of a request that a field may name: ``{header.x_tenant}``.
PLACES = ("path", "query", "header", "cookie", "body")
#: The types of values that have one text, besides Enums of these; a bool is not an int here.
TEXTS = (str, int, UUID, date, Decimal, IPv4Address, IPv6Address)
_FIELD = re.compile(rf"(?:({'|'.join(PLACES)})\.)?([\w-]+)")


class Field:
    """One field of a template: ``{order_id}``, or ``{query.order_id}`` with its place in a request.

    :raises ValueError: when it is neither.
    """

    def __init__(self, template: str, text: str) -> None:
        found = _FIELD.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{template!r}: {{{text}}} names no parameter: write {{name}}, or {{path.name}}, "
                "{query.name}, {header.name}, {cookie.name} or {body.name} for a request's"
            )
        self.text = text
        self.place: str = found[1] or ""
        self.name = found[2]


class Template:
    """A name with fields in it: ``"order:{order_id}"``.

    :raises TypeError: when the template is no str.
    :raises ValueError: when it cannot be a name, or two values could run into each other.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"the template of a lock's name must be a str, not {text!r}")
        self.text = text
        self._literals, fields = _take_apart(text)
        self.fields = [Field(text, field) for field in fields]
        check_text("the template of a lock's name", "".join(self._literals) or "-" * len(fields))
        for literal in self._literals[1:-1]:
            if not _punctuation(literal) - {"%"}:
                raise ValueError(f"{text!r}: put a separator, such as ':', between two fields")
        encoded = _punctuation("".join(self._literals)) | {"%"}
        self._encoded = str.maketrans({char: _percent(char) for char in encoded})

    def fill(self, values: Sequence[object]) -> str:
        """Return the name with these values in its fields.

        :raises TypeError: for a value that has no one text.
        :raises ValueError: when the name is empty, too long or no text.
        """
        texts = [
            text_of(f"{self.text!r}: {field.name}", value).translate(self._encoded)
            for field, value in zip(self.fields, values, strict=True)
        ]
        return check_text(
            "name", "".join(map("".join, zip_longest(self._literals, texts, fillvalue="")))
        )


def name(template: str, /, **values: object) -> str:
    """Return the name of a template with these values, for ``inspect``, ``break_lock`` and ``forget``.

    ``@client.locked``, ``once_per`` and, in FastAPI, ``Locked`` and ``Once`` make the same name of the
    same template and values.

    ```python
    await client.forget(aiodlock.name("mail:{email}", email="alice@example.com"))
    ```

    :param template: the name, with a field in each pair of braces.
    :param values: of the fields, by their names: a str, an int or a UUID, an Enum of these, a date, a
        Decimal or an IP address. (The value of ``{header.x-tenant}`` is given as ``x_tenant=``.)
    :raises TypeError: for a value of another type (a bool is not an int here), and for one without a field.
    :raises ValueError: for a field without a value, a template that is none, and a name that is too long.
    """
    parsed = Template(template)
    known = [field.name.replace("-", "_") for field in parsed.fields]
    if len(set(known)) < len({field.text for field in parsed.fields}):
        raise ValueError(
            f"{template!r}: two fields have one name, and could have two values: name them differently"
        )
    for given in values:
        if given not in known:
            raise TypeError(f"{template!r} has no field {{{given}}}")
    for needed in known:
        if needed not in values:
            raise ValueError(f"{template!r}: {{{needed}}} has no value")
    return parsed.fill([values[key] for key in known])


def text_of(what: str, value: object) -> str:
    """Return the one text of a value.

    :param what: the value's name, for errors.
    :raises TypeError: when equal values could have different texts, or different values the same.
    :raises ValueError: when the text would be too long for a name.
    """
    if isinstance(value, Enum):
        return text_of(what, value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, datetime):
        return _moment(what, value)
    if isinstance(value, Decimal):
        return _decimal(what, value)
    if isinstance(value, TEXTS) and not isinstance(value, bool):
        return str(value)
    raise TypeError(
        f"{what} must be a str, an int or a UUID (or an Enum of these, a date, a Decimal or an IP address) "
        f"to be part of a lock's name, not {value!r:.200}"
    )


def _moment(what: str, value: datetime) -> str:
    """Return a moment in UTC, or as it is if it knows no zone."""
    try:
        return (value if value.utcoffset() is None else value.astimezone(UTC)).isoformat()
    except OverflowError:
        raise ValueError(f"{what} is a moment that UTC has no date for: {value}") from None


def _decimal(what: str, value: Decimal) -> str:
    """Return a number in plain decimals, without the zeros at its end: ``7.0`` is ``7``."""
    if not value.is_finite():
        raise ValueError(f"{what} must be a number, not {value}")
    if value and abs(value.adjusted()) > LONGEST_NAME:
        raise ValueError(f"{what} is too long for a lock's name: {value!r:.100}")
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _take_apart(text: str) -> tuple[list[str], list[str]]:
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


def _punctuation(text: str) -> set[str]:
    return {char for char in text if not char.isalnum()}


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())

"""Every condition of a text in Lua, PL/pgSQL or Python, and the text without it. No I/O.

An operand of `and` is taken out by `true`, one of `or` by `false`, and a condition that is one alone by
`false`. So a rule is gone, or a case is never met.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Language = Literal["lua", "sql", "python"]


@dataclass(frozen=True)
class Mutant:
    """What stands from ``start`` to ``end`` becomes ``new``."""

    start: int
    end: int
    new: str

    def of(self, text: str) -> str:
        """Return the text without the condition."""
        return text[: self.start] + self.new + text[self.end :]


class _Token(NamedTuple):
    text: str
    start: int
    end: int


_TOKENS: dict[str, re.Pattern[str]] = {
    "lua": re.compile(
        r"(?P<skip>--\[\[.*?\]\]|--[^\n]*|\s+)|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
        r"|[A-Za-z_]\w*|\d+(?:\.\d+)?|\.\.|[=~<>]=|.",
        re.DOTALL,
    ),
    "sql": re.compile(
        r"(?P<skip>--[^\n]*|/\*.*?\*/|\s+)|E?'(?:''|[^'])*'|\$\w*\$|[A-Za-z_]\w*|\d+(?:\.\d+)?"
        r"|:=|::|\|\||[<>!]=|<>|.",
        re.DOTALL | re.IGNORECASE,
    ),
}
#: Where an operand ends, on either side.
_LUA_BOUNDS = "and or then if elseif while until return do end else local for function = , ; { ( ["
_SQL_BOUNDS = (
    "and or then if elsif when where on having return := , ; ( [ select from group order limit for "
    "returning loop union else end begin while using join cross set values"
)
_BOUNDS = {"lua": frozenset(_LUA_BOUNDS.split()), "sql": frozenset(_SQL_BOUNDS.split())}
_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}"}, {")": "(", "]": "[", "}": "{"}
_LUA_WORDS = frozenset(_LUA_BOUNDS.split()) | {"not", "repeat", "break", "in"}


def conditions(text: str, language: Language) -> list[Mutant]:
    """Return every condition of the text, in order."""
    found = set(_of_python(text) if language == "python" else _of_tokens(text, language))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end))


def _of_python(text: str) -> Iterator[Mutant]:
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    raw = text.encode()

    def place(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        return len(raw[:start].decode()), len(raw[:end].decode())

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BoolOp):
            new = "True" if isinstance(node.op, ast.And) else "False"
            for value in node.values:
                yield Mutant(*place(value), new)
        tests: list[tuple[ast.expr, str]] = []
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            tests = [(node.test, "False")]
        elif isinstance(node, ast.comprehension):
            tests = [(one, "True") for one in node.ifs]
        for test, new in tests:
            constant = isinstance(test, ast.Constant) or (
                isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
            )
            if not isinstance(test, ast.BoolOp) and not constant:
                yield Mutant(*place(test), new)


def _of_tokens(text: str, language: str) -> Iterator[Mutant]:
    tokens = [
        _Token(match[0].lower() if language == "sql" else match[0], match.start(), match.end())
        for match in _TOKENS[language].finditer(text)
        if match["skip"] is None
    ]
    for at, token in enumerate(tokens):
        if token.text in ("and", "or"):
            if language == "sql" and token.text == "and" and _is_of_between(tokens, at):
                continue
            new = "true" if token.text == "and" else "false"
            left = _left(tokens, at, language)
            right = _right(tokens, at, language)
            if left < at:
                yield Mutant(tokens[left].start, tokens[at - 1].end, new)
            if right > at:
                yield Mutant(tokens[at + 1].start, tokens[right].end, new)
        elif token.text in ("if", "elseif", "elsif") or (
            language == "sql" and token.text == "when"
        ):
            then = _then(tokens, at)
            whole = tokens[at + 1 : then]
            if then is None or _joins(whole) or not whole:
                continue
            if token.text == "when" and (len(whole) == 1 or whole[0].text == "sqlstate"):
                continue  # a case by value, or an exception
            yield Mutant(whole[0].start, whole[-1].end, "false")


def _joins(tokens: Sequence[_Token]) -> bool:
    """Tell whether operands are joined at the top."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        joins = token.text == "or" or (token.text == "and" and not _is_of_between(tokens, at))
        if depth == 0 and joins:
            return True
    return False


def _is_of_between(tokens: Sequence[_Token], at: int) -> bool:
    for token in reversed(tokens[max(0, at - 8) : at]):
        if token.text == "between":
            return True
        if token.text in ("and", "or", "then", "where", "if", ";"):
            return False
    return False


def _then(tokens: Sequence[_Token], at: int) -> int | None:
    depth = 0
    for place in range(at + 1, len(tokens)):
        text = tokens[place].text
        depth += (text in _OPEN) - (text in _CLOSE)
        if depth == 0 and text == "then":
            return place
        if text in (";", "do") or depth < 0:
            return None
    return None


def _left(tokens: Sequence[_Token], at: int, language: str) -> int:
    """Return where the operand in front of a join begins."""
    bounds = _BOUNDS[language] - ({"and"} if tokens[at].text == "or" else set())
    place = at - 1
    while place >= 0:
        text = tokens[place].text
        splits = language == "lua" and place < at - 1 and _begins(tokens[place], tokens[place + 1])
        if text in bounds or splits:
            break
        if text in _CLOSE:
            place = _matching(tokens, place, -1)
        place -= 1
    return place + 1


def _right(tokens: Sequence[_Token], at: int, language: str) -> int:
    """Return where the operand behind a join ends."""
    bounds = _BOUNDS[language] - ({"and"} if tokens[at].text == "or" else set()) - set(_OPEN)
    place = at + 1
    while place < len(tokens):
        text = tokens[place].text
        splits = language == "lua" and place > at + 1 and _begins(tokens[place - 1], tokens[place])
        if text in _CLOSE or text in bounds or splits:
            break
        if text in _OPEN:
            place = _matching(tokens, place, 1)
        place += 1
    return place - 1


def _begins(before: _Token, token: _Token) -> bool:
    """Tell whether a statement of Lua begins at a token: two values in a row are of two statements."""
    ended = before.text[-1].isalnum() or before.text[-1] in "_)]}'\""
    begins = token.text[0].isalpha() or token.text[0] == "_"
    return ended and begins and before.text not in _LUA_WORDS and token.text not in ("and", "or")


def _matching(tokens: Sequence[_Token], at: int, step: int) -> int:
    depth, place = 0, at
    while 0 <= place < len(tokens):
        text = tokens[place].text
        depth += (text in _OPEN) - (text in _CLOSE)
        if depth == 0:
            return place
        place += step
    return place - step


def described(text: str, mutant: Mutant) -> str:
    """Return the line of a condition, and what becomes of it."""
    line = text.count("\n", 0, mutant.start) + 1
    taken = " ".join(text[mutant.start : mutant.end].split())
    start = text.rfind("\n", 0, mutant.start) + 1
    end = text.find("\n", mutant.end)
    whole = " ".join(text[start : end if end >= 0 else len(text)].split())
    return f"{line}: `{taken}` -> {mutant.new} in `{whole}`"

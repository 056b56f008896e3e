"""The finder of conditions finds each one, and takes out what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conditions import Language, conditions

_ROOT = Path(__file__).parents[2]


def without(text: str, language: Language) -> list[str]:
    return [mutant.of(text) for mutant in conditions(text, language)]


def test_operands_and_whole_conditions_of_lua() -> None:
    text = "local x = a and f(b, c) or 'd'\ny = 1 -- and\nif not g then return h and 1 end"
    assert without(text, "lua") == [
        text.replace("a and f(b, c) or", "true and f(b, c) or"),
        text.replace("a and f(b, c)", "false"),
        text.replace("f(b, c)", "true"),
        text.replace("'d'", "false"),
        text.replace("not g", "false"),
        text.replace("h and", "true and"),
        text.replace("and 1 end", "and true end"),
    ]


def test_operands_and_whole_conditions_of_sql() -> None:
    text = "if (a = 1 or b) AND left(c, 2) = 'x and y' then d := case when e > 0 then 1 end; end if; -- or"
    assert without(text, "sql") == [
        text.replace("(a = 1 or b)", "true"),
        text.replace("a = 1", "false"),
        text.replace("or b", "or false"),
        text.replace("left(c, 2) = 'x and y'", "true"),
        text.replace("e > 0", "false"),
    ]


def test_bounds_of_between_and_exceptions_are_no_conditions_of_sql() -> None:
    assert not without("select 1 where a between 1 and 2; exception when others then null;", "sql")


def test_operands_and_whole_conditions_of_python() -> None:
    text = "if a and (b or 'é'):\n    x = [y for y in z if y]\nwhile True:\n    pass\n"
    assert without(text, "python") == [
        text.replace("a and", "True and"),
        text.replace("b or", "False or"),
        text.replace("b or 'é'", "True"),
        text.replace("'é'", "False"),
        text.replace("if y]", "if True]"),
    ]


@pytest.mark.parametrize(
    ("files", "language", "least"),
    [
        ("aiodlock/backends/redis/lua/*.lua", "lua", 400),
        ("aiodlock/backends/postgres/schema.sql", "sql", 250),
        ("aiodlock/backends/memory/machine.py", "python", 100),
    ],
)
def test_conditions_of_the_protocol_are_found(files: str, language: Language, least: int) -> None:
    found = 0
    for path in _ROOT.glob(files):
        text = path.read_text()
        mutants = conditions(text, language)
        found += len(mutants)
        assert len({(mutant.start, mutant.end, mutant.new) for mutant in mutants}) == len(mutants)
        for mutant in mutants:
            taken = text[mutant.start : mutant.end]
            assert taken.strip() == taken
            assert sum(taken.count(one) for one in "([{") == sum(taken.count(one) for one in ")]}")
            if language == "python":
                # Not `ast.parse`: on 3.11 it fails when the collector runs a finalizer meanwhile.
                compile(mutant.of(text), str(path), "exec", dont_inherit=True)
    assert found >= least

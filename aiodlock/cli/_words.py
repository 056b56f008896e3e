"""``run``: which words of a command line are its own, and which are those of the command that it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand


class RunCommand(TyperCommand):
    """Reads options before NAME, and between NAME and COMMAND. What follows COMMAND belongs to COMMAND.

    As with ``flock``, ``timeout`` and ``nice``. Else ``run backup cp -n a b`` would take away ``cp``'s
    ``-n``, and run another command than the one that was written.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the words in an order in which they can be read in one way."""
        return super().parse_args(ctx, ordered(args, _with_a_value(self.params)))


def ordered(words: list[str], with_a_value: Iterable[str]) -> list[str]:
    """Return the options first, then ``--``, NAME and COMMAND with its words."""
    valued = frozenset(with_a_value)
    options: list[str] = []
    name: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":  # this one is ours, another one is the command's
            at += 1
            break
        if word.startswith("-") and word != "-":
            taken = 2 if _takes_the_next(word, valued) else 1
            options += words[at : at + taken]
            at += taken
        elif name:
            break
        else:
            name.append(word)
            at += 1
    rest = [*name, *words[at:]]
    return [*options, "--", *rest] if rest else options


def _takes_the_next(word: str, valued: frozenset[str]) -> bool:
    """Return whether the value of an option is the word behind it."""
    if word.startswith("--"):
        return word in valued
    # Short ones may stand together; behind one that has a value, the rest of the word is that.
    for at, letter in enumerate(word[1:], 2):
        if f"-{letter}" in valued:
            return at == len(word)
    return False


def _with_a_value(parameters: Iterable[Any]) -> set[str]:
    options = [one for one in parameters if one.param_type_name == "option" and not one.is_flag]
    return {text for one in options for text in (*one.opts, *one.secondary_opts)}

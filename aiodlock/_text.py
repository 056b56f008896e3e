"""Texts of users, as people may see them."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape what would break a line, a terminal, or the direction of a text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plural(count: int, word: str) -> str:
    """Return ``1 time``, ``2 times``."""
    return f"{count} {word}{'' if count == 1 else 's'}"

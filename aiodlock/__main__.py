"""``python -m aiodlock``: the command."""

from .cli import main

main()

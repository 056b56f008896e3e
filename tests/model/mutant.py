"""The machine of ``memory://`` without one of its rules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from aiodlock.backends.memory import machine
from aiodlock.backends.memory.machine import Name


def mutated(old: str, new: str) -> type[Name]:
    """Return the class of a machine in whose text `old`, which stands there once, is `new`."""
    assert machine.__file__ is not None
    source = Path(machine.__file__).read_text()
    assert source.count(old) == 1, f"this is not in the machine any more: {old}"
    module = ModuleType("mutant")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    # What it says has the usual types.
    module.__dict__.update(Message=machine.Message, Seen=machine.Seen)
    found: type[Name] = module.__dict__["Name"]
    return found

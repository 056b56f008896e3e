"""How far a store has come with one request, as its place knows it. (The core has states of its own.)"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Stage(Enum):
    """One after the other; some are left out."""

    NEW = "new"  # not asked yet
    ASKING = "asking"  # not acknowledged yet: the store may know it
    WAITING = "waiting"  # queued; also when granted, and the core was not told yet
    HELD = "held"
    OVER = "over"  # gone, lost or left: nothing is extended any more


# What all modules read: on Python 3.11 an attribute of an Enum takes a hundred times as long as a global.
NEW: Final = Stage.NEW
ASKING: Final = Stage.ASKING
WAITING: Final = Stage.WAITING
HELD: Final = Stage.HELD
OVER: Final = Stage.OVER

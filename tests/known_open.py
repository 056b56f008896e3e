"""Tests that fail, or may, since the protocol changed, and that nobody has understood yet: open work.

They run, and are shown as expected to fail. Whoever mends one takes it off this list.
"""

from __future__ import annotations

import re

#: By a pattern of the test's id: what is known.
KNOWN_OPEN: dict[str, str] = {}


def reason_of(nodeid: str) -> str | None:
    """Return why a test is expected to fail, if it is."""
    return next((why for form, why in KNOWN_OPEN.items() if re.search(form, nodeid)), None)

"""What backends show to people of what they know."""

from __future__ import annotations

from aiodlock import HolderInfo
from aiodlock.backends.asked import by_owner


def test_named_owner_and_task_that_read_alike_are_two() -> None:
    """Else "break what was shown" would miss one of them."""
    holds = [
        HolderInfo(owner, "shared", token, 1, None, "client", "", "")
        for token, owner in enumerate(["u7", "t7", "u7", "ua%2Fb"])
    ]
    found = by_owner(holds)
    assert [(one.owner, one.count, one.token) for one in found] == [
        ("7", 2, 2),
        ("7", 1, 1),
        ("a/b", 1, 3),
    ]

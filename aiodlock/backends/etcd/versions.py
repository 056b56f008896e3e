"""Which versions of etcd keep leases that can be relied on."""

from __future__ import annotations

import re

#: The first versions of each line whose leases can be relied on. With older ones a leader that was stopped
#: confirms and revokes the wrong leases when it wakes. What is written here does not depend on it.
HONEST = ((3, 4, 38), (3, 5, 23), (3, 6, 5))


def too_old(version: str) -> str | None:
    """Return the version that a server should have at least, if this one is older."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return None
    mine = tuple(map(int, found.groups()))
    for honest in HONEST:
        if mine[:2] == honest[:2]:
            return None if mine >= honest else ".".join(map(str, honest))
    return None if mine > HONEST[-1] else ".".join(map(str, HONEST[0]))

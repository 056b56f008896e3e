"""Which versions of what is kept may work under a prefix, as a mark says that every version reads.

The keys of a version carry its number, so clients of two versions never meet: both would hold. Therefore a
later version that uses other keys writes the mark, `MIN MAX`, before it writes any of them. Without a mark
the version of the first release is at work.
"""

from __future__ import annotations


def allows(mark: object, version: str) -> bool:
    """Tell whether a mark allows this version; words behind the two numbers are a later version's."""
    words = mark.split(b" ") if isinstance(mark, bytes) else []
    if len(words) < 2 or not all(word.isdigit() and len(word) < 10 for word in words[:2]):
        return False
    return int(words[0]) <= int(version) <= int(words[1])


def refused(mark: object, prefix: str, version: str) -> str:
    """Return what a client is told that may not work there."""
    return (
        f"the versions {mark!r:.60} of aiodlock's protocol are at work under the prefix {prefix!r}, "
        f"and this release has version {version}: use the release that the other clients use"
    )

"""URLs that cannot be read, and what is said of them. No part of a password is told."""

from __future__ import annotations

import re

ENCODE = "check it, and percent-encode '/', '?', '#' and '@' in the user and the password"


def without_password(url: str, why: str) -> str:
    """Return why a URL cannot be read, or other words where these quote a part of its password.

    Of a password that is not percent-encoded, a part is read as a port, a path or an option.
    """
    secret = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    quoted = any(part and part in why for part in re.split("[:/?#@]", secret))
    return ENCODE if quoted else why


def check_host(host: str) -> None:
    """Raise ValueError for a name that no resolver takes: resolving it fails with no OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"no host can be called {host!r}") from None

"""What a client is called in its store."""

from __future__ import annotations

import os
import secrets
import socket
from urllib.parse import quote


def make_label() -> str:
    """Return a name for one client: where it runs, and something that no other has."""
    return f"{quote(socket.gethostname(), safe='')}-{os.getpid()}-{secrets.token_hex(6)}"

"""What a client is called in its store."""

from __future__ import annotations

import os
import secrets
import socket
from urllib.parse import quote


def make_label() -> str:
    """Return a name for one client: the process that it runs in, and something that no other client has."""
    return process_label() + secrets.token_hex(6)


def process_label() -> str:
    """Return what the names of all clients of this process begin with."""
    return f"{quote(socket.gethostname(), safe='')}-{os.getpid()}-"

"""The files of TLS. Certificates are replaced while clients run, so they are read for each connection."""

from __future__ import annotations

import asyncio
import logging
import ssl

_logger = logging.getLogger("aiodlock")

#: How long reading them may take (seconds). It takes one of the loop's threads.
_READ_WITHIN = 0.5


class Tls:
    """How connections are encrypted.

    Mutable state: ``_context`` (what the files said when they were last read).
    """

    def __init__(self, ca: str | None, cert: str | None, key: str | None) -> None:
        """:raises OSError: if a file cannot be read."""
        self._ca = ca
        self._cert = cert
        self._key = key
        self._context = self._read()

    def __repr__(self) -> str:
        return f"<Tls ca={self._ca} cert={self._cert}>"

    async def get_context(self) -> ssl.SSLContext:
        """Return what the files say now; what they said before, if they cannot be read."""
        if self._ca is not None or self._cert is not None:
            try:
                async with asyncio.timeout(_READ_WITHIN):
                    self._context = await asyncio.to_thread(self._read)
            except (OSError, RuntimeError) as failed:  # TimeoutError is an OSError
                # Just being replaced; or no thread is to be had: all are busy, or the main one has ended.
                text = str(failed) or "no thread was free to read them"
                _logger.warning("ZooKeeper: going on with the files of TLS as they were: %s", text)
        return self._context

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca)
        if self._cert is not None:
            context.load_cert_chain(self._cert, self._key)
        return context

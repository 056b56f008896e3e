"""The files of TLS. Certificates are replaced while clients run, so they are read for each connection."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence

_logger = logging.getLogger("aiodlock")

#: How long reading them may take (seconds). It takes one of the loop's threads.
_READ_WITHIN = 0.5


class Tls:
    """How connections to one store are encrypted.

    :param store: what the log calls it.
    :param protocols: those to be offered to the server (ALPN).

    Mutable state: ``_context`` (what the files said when they were last read).
    """

    def __init__(
        self,
        store: str,
        *,
        ca: str | None,
        cert: str | None,
        key: str | None,
        protocols: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._ca = ca
        self._cert = cert
        self._key = key
        self._protocols = list(protocols)
        self._context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"<Tls ca={self._ca} cert={self._cert}>"

    def read(self) -> None:
        """Read the files.

        :raises OSError: if one cannot be read.
        """
        context = ssl.create_default_context(cafile=self._ca)
        if self._cert is not None:
            context.load_cert_chain(self._cert, self._key)
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        self._context = context

    async def get_context(self) -> ssl.SSLContext:
        """Return what the files say now; what they said before, if they cannot be read.

        ``read`` was called before.
        """
        if self._ca is not None or self._cert is not None:
            try:
                async with asyncio.timeout(_READ_WITHIN):
                    await asyncio.to_thread(self.read)
            except (OSError, RuntimeError) as failed:  # TimeoutError is an OSError
                # Just being replaced; or no thread is to be had: all are busy, or the main one has ended.
                text = str(failed) or "no thread was free to read them"
                _logger.warning(
                    "%s: going on with the files of TLS as they were: %s", self._store, text
                )
        assert self._context is not None
        return self._context

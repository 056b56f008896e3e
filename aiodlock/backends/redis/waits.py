"""What clients tell of their waits, at one server: a key for each client, in its own slot."""

from __future__ import annotations

from collections.abc import Sequence

from .keys import waits_key
from .replies import wrong_shape
from .scripts import TELL
from .server import Server

#: Of a record's key: the serial, then the record.
_DIGITS = 20

#: A serial, and the record that has it.
Told = tuple[int, bytes]


class Waits:
    """Tells and reads records. Mutable state: ``_told`` (the serial that the server has acknowledged)."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._prefix = server.settings.prefix
        self._told = -1

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Keep this client's record, or keep it longer."""
        if serial != self._told or await self._send(serial, b"again", keep) == b"missing":
            self._told = -1
            await self._send(serial, record, keep)
        self._told = serial

    async def _send(self, serial: int, record: bytes, keep: float) -> bytes:
        key = waits_key(self._prefix, self._server.label)
        words = (f"{serial:0{_DIGITS}}", round(keep * 1000), record)
        reply = await self._server.eval(TELL, (key,), words)
        try:
            (word,) = reply
        except (TypeError, ValueError) as wrong:
            raise wrong_shape("tell", reply) from wrong
        if word not in (b"told", b"older", b"missing"):
            raise wrong_shape("tell", reply)
        return bytes(word)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return the records of these clients."""
        return records(await self.told(labels))

    async def told(self, labels: Sequence[str]) -> dict[str, Told]:
        """Return the records of these clients with their serials; an empty one was taken back."""
        link = self._server.link
        wire = link.wire or await link.wait_up()
        keys = [waits_key(self._prefix, label) for label in labels]
        # One by one: all at once would be an answer of any size.
        sent = [wire.send("GET", key) for key in keys]
        found: dict[str, Told] = {}
        for label, reply in zip(labels, sent, strict=True):
            text = await self._server.answer(reply, wire)
            if isinstance(text, bytes) and text[:_DIGITS].isdigit():
                found[label] = int(text[:_DIGITS]), text[_DIGITS:]
        return found


def newest(answers: Sequence[dict[str, Told]]) -> dict[str, Told]:
    """Return what the newest record of each client is, as several servers tell it."""
    found: dict[str, Told] = {}
    for answer in answers:
        for label, told in answer.items():
            if label not in found or told[0] > found[label][0]:
                found[label] = told
    return found


def records(told: dict[str, Told]) -> dict[str, bytes]:
    """Return the records without their serials."""
    return {label: record for label, (_, record) in told.items() if record}

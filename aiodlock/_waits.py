"""What a client tells others of its long waits: one record, which the store keeps under the client's label.

Every client can read it, also while the one that wrote it is busy. So others learn what the tasks of a
holder wait for. When the client's process dies, the record ends by itself.

A record has up to 64 KiB, with the oldest waits first: younger ones may be missing. It is compressed,
since thousands of waits differ in little. Each of its lines is JSON, a list of groups: waits for one name,
by tasks inside the same blocks.

- *Additions* are written at most twice a second, and before a search that counts on them.
- *Narrowing* is written at once: a task has left a block while it waits, or its wait has ended without a
  grant. Else others might believe that it still waits inside that block.
- A record that has not changed is only kept longer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

from ._clock import now
from ._cycles import Block, Wait
from ._model import Kind
from ._options import check_text
from ._patience import soon

if TYPE_CHECKING:
    from .backends.base import Backend

_logger = logging.getLogger("aiodlock")

#: The largest record (bytes), what is read of one at most, decompressed, and its longest line.
_LARGEST, _LARGEST_READ, _LONGEST_LINE = 64 * 1024, 4 * 1024 * 1024, 512 * 1024
#: So much is decompressed in one turn of the event loop.
_PART = 32 * 1024
#: So many waits are written or read in one turn of the event loop.
_LINE = 100
#: The record of a dead client ends so many seconds later. A living one keeps its record at each third.
KEEP = 5.0
#: Additions are written so often (seconds).
PACE = 0.5
#: A write that failed is repeated after so many seconds.
_AGAIN = 0.25
#: Large records cost time: writing takes at most this share of it.
_SHARE = 0.1


class Record:
    """Tells the waits of one client.

    Mutable state: ``waits`` (by request id, in the order in which they became long: the oldest first),
    ``_serial`` (of their last change), ``_narrowed`` (of the last
    narrowing), ``_written`` (of the last acknowledged record), ``_encoded`` (the last record), ``_named``
    and ``_maybe_named`` (the blocks that the acknowledged record names, and those that later ones name,
    which may have arrived), ``_due`` (when to write) and ``_not_before``, ``_running``, ``_hurry`` (set
    when ``_due`` comes nearer), ``_news`` (set by each acknowledgement).
    """

    def __init__(
        self,
        backend: Backend,
        start_soon: Callable[[Callable[[], Coroutine[Any, Any, None]]], bool],
    ) -> None:
        self.waits: dict[str, Wait] = {}
        self._backend = backend
        self._start_soon = start_soon
        # Larger than that of any record that was told under the same label before.
        self._serial = self._written = self._narrowed = int(now() * 1e6)
        self._encoded: tuple[int, bytes] = (0, b"")
        self._named: frozenset[Block] = frozenset()
        self._maybe_named: set[Block] = set()
        self._due = self._not_before = math.inf
        self._running = False
        self._hurry = asyncio.Event()
        self._news = asyncio.Event()

    def put(self, wait: Wait) -> None:
        """Tell one more wait; or tell one anew, whose task is in fewer blocks now."""
        narrower = wait.id in self.waits
        self.waits[wait.id] = wait
        self._change(at_once=narrower)

    def remove(self, id: str, *, granted: bool) -> None:
        """A wait has ended."""
        if self.waits.pop(id, None) is not None:
            self._change(at_once=not granted or not self.waits)

    def names(self, block: Block) -> bool:
        """Tell whether others may read that a task waits inside this block."""
        return block in self._named or block in self._maybe_named

    async def told(self, *, narrowing: bool = False) -> None:
        """Wait until the store has what is known now.

        :param narrowing: what was known at the last narrowing is enough.
        :raises TimeoutError: when it has not after some seconds.
        """
        serial = self._narrowed if narrowing else self._serial
        if self._written < serial:
            self._write_at(now())
        async with asyncio.timeout(self._within):
            while self._written < serial:
                self._news.clear()
                await self._news.wait()

    @property
    def _within(self) -> float:
        """How long a write may take (seconds)."""
        return soon(self._backend.answers_within)

    # -- writing ---------------------------------------------------------------------------------------

    def _change(self, *, at_once: bool) -> None:
        self._serial += 1
        if at_once:
            self._narrowed = self._serial
        if not self._running:
            self._not_before, self._due = now(), math.inf
            self._running = self._start_soon(self._run)
        self._write_at(now() if at_once else self._not_before + PACE)

    def _write_at(self, moment: float) -> None:
        if moment < self._due:
            self._due = moment
            self._hurry.set()

    async def _run(self) -> None:
        """Write and keep the record for as long as there are waits; take it back then."""
        ends_at = 0.0  # by then the store has forgotten what was written, whatever that was
        try:
            while self.waits or (self._written < self._serial and now() < ends_at):
                await self._until_due()
                self._due = math.inf
                if self.waits:
                    ends_at = now() + self._within + KEEP
                try:
                    await self._write()
                except Exception as error:  # whatever it is: leases must not be lost for it
                    _logger.debug(
                        "telling what is waited for failed: %r",
                        error,
                        extra={"event": "waits_not_told"},
                    )
                    self._not_before = now() + _AGAIN
                    self._write_at(self._not_before)
                else:
                    self._write_at(now() + KEEP / 3)
        finally:
            self._running = False
            self._named, self._maybe_named = frozenset(), set()

    async def _until_due(self) -> None:
        while (pause := max(self._due, self._not_before) - now()) > 0:
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()

    async def _write(self) -> None:
        serial, began = self._serial, now()
        if self._encoded[0] != serial:
            record, blocks = await encode(list(self.waits.values()))
            self._encoded = serial, record
        else:
            record, blocks = self._encoded[1], self._named | self._maybe_named
        self._not_before = now() + min(PACE, (now() - began) / _SHARE)
        self._maybe_named |= blocks  # from here on it may arrive
        async with asyncio.timeout(self._within):
            await self._backend.tell_waits(serial, record, keep=KEEP)
        self._named, self._maybe_named = frozenset(blocks), set()
        self._written = serial
        self._news.set()


# -- the record --------------------------------------------------------------------------------------


async def encode(waits: Sequence[Wait]) -> tuple[bytes, frozenset[Block]]:
    """Return a record of these waits, the oldest first, and the blocks that it names.

    Nothing here is done for all of them in one turn of the event loop: sorting thousands stopped it.
    """
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    record, named = bytearray(), set[Block]()
    for at in range(0, len(waits), _LINE):
        line = waits[at : at + _LINE]
        # Flushed, so that its length is known, and that what does not fit can be left out.
        packed = packer.compress(_encode_line(line)) + packer.flush(zlib.Z_SYNC_FLUSH)
        if len(record) + len(packed) > _LARGEST:
            break
        record += packed
        named.update(block for wait in line for block in wait.inside)
        await asyncio.sleep(0)
    return bytes(record), frozenset(named)


def _encode_line(waits: Iterable[Wait]) -> bytes:
    groups: dict[object, list[Any]] = {}
    for wait in waits:
        blocks = [[*where, token] for where, token in sorted(wait.inside)]
        group = groups.setdefault(
            (wait.where, wait.mode, wait.inside), [*wait.where, wait.mode, blocks, []]
        )
        owner = "" if wait.owner == wait.id else wait.owner
        group[-1].append([wait.id, owner, wait.arrived, wait.note])
    return json.dumps(list(groups.values()), separators=(",", ":")).encode() + b"\n"


async def decode(client: str, record: bytes) -> dict[str, Wait]:
    """Return the waits in a record, by id; what cannot be read is left out."""
    waits: dict[str, Wait] = {}
    unpacker = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    rest, size = record, 0
    text = b""
    while rest and size < _LARGEST_READ and len(text) < _LONGEST_LINE:
        try:
            part = unpacker.decompress(rest, _PART)
        except zlib.error:
            break
        rest, size = unpacker.unconsumed_tail, size + len(part)
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            waits.update((wait.id, wait) for wait in _decode_line(client, line))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    return waits


def _decode_line(client: str, line: bytes) -> Iterable[Wait]:
    try:
        groups = json.loads(line)
        if not isinstance(groups, list):
            return
    except (ValueError, RecursionError):
        return
    for group in groups:
        try:
            yield from list(_decode_group(client, *group))
        except (ValueError, TypeError, OverflowError):
            continue


def _decode_group(
    client: str, kind: Any, name: Any, mode: Any, blocks: Any, members: Any
) -> Iterable[Wait]:
    if mode not in ("exclusive", "shared") or not {kind, *(of for of, _, _ in blocks)} <= _KINDS:
        raise ValueError
    inside = frozenset(((of, check_text("name", on)), int(token)) for of, on, token in blocks)
    name = check_text("name", name)
    for id, owner, arrived, note in members:
        id = str(id)
        yield Wait(id, name, mode, str(owner) or id, client, int(arrived), inside, str(note), kind)


_KINDS = frozenset(get_args(Kind))


class Reader:
    """Reads the records of other clients; what has not changed is not decoded again.

    Mutable state: ``_read`` (by label).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._read: dict[str, tuple[bytes, dict[str, Wait]]] = {}

    async def waits_of(self, labels: Iterable[str]) -> Mapping[str, Mapping[str, Wait]]:
        """Return what these clients tell, by label and request id."""
        records = await self._backend.waits_of(sorted(labels))
        for label, record in records.items():
            known = self._read.get(label)
            if known is None or known[0] != record:
                self._read[label] = record, await decode(label, record)
        for label in labels:
            if label not in records:
                self._read.pop(label, None)
        if len(self._read) > _MOST_READ:
            self._read = {label: self._read[label] for label in records}
        return {label: self._read[label][1] for label in records}


#: Of so many clients is it remembered what they have told.
_MOST_READ = 100

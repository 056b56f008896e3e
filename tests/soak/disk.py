"""A disk of a server's own that stands still, or is full, when the soak says so.

It is a file system in a file. Only root may mount one: without, servers keep their data where they always
do, and these faults are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Disk:
    """A mounted file system. ``frozen`` is its only state."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.frozen = False

    @contextmanager
    def making(self) -> Iterator[None]:
        """Have temporary directories be made on it."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.where)
        try:
            yield
        finally:
            tempfile.tempdir = before

    def freeze(self) -> None:
        """Have every write wait."""
        _run("fsfreeze", "--freeze", str(self.where))
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            _run("fsfreeze", "--unfreeze", str(self.where))
            self.frozen = False

    def fill(self) -> None:
        """Leave no room."""
        with (self.where / "filler").open("wb", buffering=0) as file:
            room = os.statvfs(self.where)
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
            file.seek(0, os.SEEK_END)
            with suppress(OSError):
                while True:
                    file.write(bytes(4096))

    def make_room(self) -> None:
        (self.where / "filler").unlink(missing_ok=True)


@contextmanager
def mounted(megabytes: int) -> Iterator[Disk | None]:
    """Give a disk; None where nothing can be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="aiodlock-disk-"))
    image, where = folder / "image", folder / "d"
    where.mkdir()
    try:
        if not _mount(image, where, megabytes):
            yield None
            return
        where.chmod(0o755)
        folder.chmod(0o755)
        disk = Disk(where)
        try:
            yield disk
        finally:
            disk.thaw()
            _run("umount", "--lazy", str(where))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mount(image: Path, where: Path, megabytes: int) -> bool:
    if os.getuid() != 0 or any(shutil.which(tool) is None for tool in ("mkfs.ext4", "fsfreeze")):
        return False
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    return _run("mkfs.ext4", "-q", str(image)) and _run(
        "mount", "-o", "loop", str(image), str(where)
    )


def _run(*command: str) -> bool:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False

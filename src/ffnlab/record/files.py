"""Atomic writes, and one clear message for a disk that cannot take them."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ffnlab.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new one, never a part.

    Temporary file in the same folder, fsync, rename, fsync of the folder. Raises UserError for a disk that is
    full or read-only; the old content then stays as it was.
    """
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise UserError(f"{path} is not a file: choose another name")
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, len(raw), error) from error
    finally:
        with suppress(OSError):  # of a read-only disk, which would hide the message
            temporary.unlink(missing_ok=True)


def remove_left_over(folder: Path) -> None:
    """Remove the temporary files in `folder` of writers that a kill ended."""
    for path in folder.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not _runs(int(pid)):
            with suppress(OSError):
                path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. UserError when the disk refuses, or something else has the name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, 0, error) from error


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `path` when the body is through and is removed when it fails.

    UserError where there is something at `path` already, or the disk refuses.
    """
    path = path.resolve()
    free_for(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        temporary.replace(path)  # an empty folder gives way
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, 0, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def free_for(path: Path) -> None:
    """UserError where there is something at the path of a new folder already."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} is there already: choose another --out, or move it away")


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write on the disk of `folder` (or of its nearest parent that exists)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def disk_error(path: Path, size: int, error: OSError) -> UserError:
    """The message for an OSError met while writing `size` bytes to `path`."""
    if error.errno in _FULL:
        return full_disk(path, size)
    if error.errno in _REFUSED:
        return UserError(
            f"{path}: cannot be written ({error.strerror}). Choose another place (out=..., --out)."
        )
    return UserError(f"{path}: writing {size:,} bytes failed ({error.strerror or error}).")


def full_disk(path: Path, size: int) -> UserError:
    """The message for `size` bytes that find no room at `path`."""
    return UserError(
        f"{path}: the disk is full: {size:,} bytes to write, {free_bytes(path.parent):,} bytes free. "
        "Make room and run the same command again."
    )


class HashedFile:
    """A file that is written once, front to back, and knows the sha256 of what it was given.

    `error` holds the OSError of a write that failed, for callers whose library hides it.
    """

    def __init__(self, path: Path):
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=0)
        self._sha = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        """Write all of `data`; returns its bytes."""
        view = memoryview(data).cast("B")
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:]) or 0
        except OSError as error:
            self.error = error
            raise
        self._sha.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing waits in a buffer."""

    def close(self) -> dict[str, Any]:
        """Bring everything to the disk; returns {"bytes", "sha256"} for a manifest."""
        with self._file:
            os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._sha.hexdigest()}

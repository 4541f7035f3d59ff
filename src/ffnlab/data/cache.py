"""Where tokenised text is kept, and how a folder gets there whole or not at all."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ffnlab import foreign
from ffnlab.errors import UserError

MANIFEST = "manifest.json"


def key(description: dict) -> str:
    """12 hex digits for a description of plain json values."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, data: dict) -> None:
    """Write a json file whole: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict | None:
    """The object in a json file, or None when the file is missing or torn."""
    try:
        data = foreign.read_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write tokenised text to {path}: {error.strerror or error}. Make room there, or choose "
            "another folder "
            "with the environment variable FFNLAB_CACHE."
        ) from error


def cached(folder: Path, build: Callable[[Path], dict], waiting: Callable[[], None]) -> dict:
    """The manifest of `folder`; `build(temporary)` fills the folder first when it is not there or torn.

    `build` returns the manifest, which is written last, and the whole folder is renamed into place. A kill at
    any time leaves a temporary folder that the next build sweeps away. A second process waits at the lock
    (`waiting` is called once) and finds the work done; the lock of a dead process is free.
    """
    if manifest := read_json(folder / MANIFEST):
        return manifest
    with writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            waiting()
            lock.acquire()
    try:
        if manifest := read_json(folder / MANIFEST):
            return manifest
        return _build(folder, build)
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], dict]) -> dict:
    for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    with writable(folder):
        temporary.mkdir()
    try:
        manifest = build(temporary)
        with writable(folder):
            write_json(temporary / MANIFEST, manifest)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest

"""One run directory, one process: a lock file that names its owner and does not outlive it."""

import fcntl
import json
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from ffnlab import foreign
from ffnlab.errors import UserError
from ffnlab.record.files import write_atomic


class Lock:
    """The lock of `folder`, held by this process from construction to `release`.

    The file `lock` holds pid, host, boot id and start time of its owner: a pid alone is recycled by the next
    process or the next boot. The lock of a dead owner is taken over. On another host nothing can be known of
    the owner, so its lock counts. Raises UserError when somebody else, or this process itself, holds it.
    """

    def __init__(self, folder: Path):
        self.path = folder / "lock"
        self._me = _identity(os.getpid()) | {"token": secrets.token_hex(8)}  # two locks of one process differ
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            # Two processes that find the same dead lock must not both take it: one at a time looks, and the
            # kernel drops the flock of one that dies. A file system without flock leaves a small window.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            owner = self._read()
            if owner and _alive(owner):
                raise UserError(self._refusal(owner))
            write_atomic(self.path, json.dumps(self._me))
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock back; does nothing in a forked child or when the lock is no longer ours."""
        if os.getpid() == self._me["pid"] and self._read() == self._me:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict | None:
        try:
            owner = foreign.read_json(self.path)
        except (FileNotFoundError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def _refusal(self, owner: dict) -> str:
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        text = f"out={self.path.parent} is in use by {who}: wait for it, stop it, or choose another out=..."
        if owner.get("host") != self._me["host"]:
            text += f" If that machine no longer runs it, delete {self.path}."
        return text


def _identity(pid: int) -> dict:
    return {"pid": pid, "host": socket.gethostname(), "boot": _boot(), "start": _start(pid)}


def _alive(owner: dict) -> bool:
    if owner.get("host") != socket.gethostname():
        return True
    pid = owner.get("pid")
    if owner.get("boot") != _boot() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and another user's
    return owner.get("start") == _start(pid)


def _boot() -> str:
    """The kernel's id of this boot; empty where there is none (macOS)."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _start(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of its stat); None without /proc."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None

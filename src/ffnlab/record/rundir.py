"""The run directory: who owns it, which config it belongs to, and how far it got."""

import atexit
import json
import math
import re
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from ffnlab.errors import UserError
from ffnlab.record.files import disk_error, remove_left_over, write_atomic
from ffnlab.record.lock import Lock
from ffnlab.record.metrics import Metrics, plain
from ffnlab.record.stored import leaves, load_config, read_info
from ffnlab.withheld import masked

__all__ = ["Metrics", "RunDir", "differences", "load_config", "new_name", "read_info", "write_atomic"]

STATUSES = ("running", "done", "diverged", "interrupted", "failed")
_OVER = ("done", "diverged")  # divergence is a result: the same config would diverge again


def new_name(ffn: str, act: str, seed: int) -> str:
    """A name such as 'swiglu-relu2-s0-20261130-205048-1a2b', random at the end: no two starts share it."""
    parts = (ffn, act, f"s{seed}", f"{datetime.now():%Y%m%d-%H%M%S}", secrets.token_hex(2))
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", part) for part in parts)


def differences(old: dict, new: dict, ignore: set[str]) -> list[str]:
    """What differs between two configs, one line a key: 'optim.lr: 0.02 there, 0.01 here'.

    Keys are dotted; a key in `ignore` covers all below it.
    """
    there, here = dict(leaves(old)), dict(leaves(new))
    lines = []
    for key in sorted(there.keys() | here.keys()):
        covered = any(key == skip or key.startswith(skip + ".") for skip in ignore)
        if not covered and not _same(there.get(key, ...), here.get(key, ...)):
            lines.append(f"{key}: {_shown(there, key)} there, {_shown(here, key)} here")
    return lines


class RunDir:
    """A run directory that this process owns (unless `state` is 'done') until `close` or exit.

    `state` is 'new', 'resume' (same config, unfinished) or 'done' (finished or diverged: `info()["status"]`).
    """

    def __init__(self, path: Path, state: Literal["new", "resume", "done"], lock: Lock | None):
        self.path = path
        self.state = state
        self._lock = lock
        atexit.register(self.close)

    @classmethod
    def open(cls, path: Path, config: dict, *, ignore: set[str], steps_may_grow: bool) -> "RunDir":
        """Make or enter `path` for a run with the resolved `config` (plain values).

        'Same config' = equal but for the keys in `ignore`; with `steps_may_grow`, `train.steps` may be larger
        here than there, and a finished run then goes on. Raises UserError for another config (with the
        differences), a live lock, a disk that is full or read-only, a path that is a file; nothing is then
        left behind.
        """
        config = yaml.safe_load(yaml.safe_dump(_jsonable(config), sort_keys=False))  # as it will be read back
        if _decide(path, config, ignore, steps_may_grow) == "done":
            return cls(path, "done", None)  # before the lock: a finished run may lie on a read-only disk
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
            try:
                run = cls(path, _decide(path, config, ignore, steps_may_grow), lock)
                run._begin(config)
            except BaseException:
                lock.release()
                raise
        except BaseException as error:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError):
                raise disk_error(path, 0, error) from error
            raise
        return run

    def info(self) -> dict[str, Any]:
        """The content of run.json: id, name, status, created, and what `update` added."""
        return read_info(self.path)

    def update(self, **fields: Any) -> None:
        """Merge `fields` into run.json on the top level; a number that is not finite becomes a string."""
        merged = _jsonable(self.info() | fields, finite=True)
        write_atomic(self.path / "run.json", json.dumps(merged, indent=2, allow_nan=False) + "\n")

    def set_status(self, status: str) -> None:
        """Write the status: running, done, diverged, interrupted or failed."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}")
        self.update(status=status)

    def close(self) -> None:
        """Give the directory back to others; safe to call twice."""
        if self._lock:
            self._lock.release()
            self._lock = None
        atexit.unregister(self.close)

    def _begin(self, config: dict) -> None:
        if self.state == "done":
            return self.close()
        remove_left_over(self.path)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110)
        file = self.path / "config.yaml"
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # ignored keys, or more steps
            write_atomic(file, text)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        first = {"id": secrets.token_hex(4), "name": self.path.resolve().name, "created": created}
        try:
            self.update(**first | self.info() | {"status": "running"})
        except UserError:
            if self.state == "new":  # nothing half-written
                file.unlink()
            raise


def _decide(
    path: Path, config: dict, ignore: set[str], steps_may_grow: bool
) -> Literal["new", "resume", "done"]:
    if path.exists() and not path.is_dir():
        raise UserError(f"out={path} is a file; a run needs a folder.")
    if not (path / "config.yaml").exists():
        left = [name for name in ("metrics.jsonl", "checkpoints", "neurons.zarr") if (path / name).exists()]
        if left:
            raise UserError(f"out={path} holds {', '.join(left)} but no config.yaml. Choose another out=...")
        return "new"
    there = load_config(path)
    steps_there, steps_here = ((c.get("train") or {}).get("steps") for c in (there, config))
    grows = steps_may_grow and steps_there is not None and steps_here is not None and steps_here > steps_there
    different = differences(there, config, ignore | ({"train.steps"} if grows else set()))
    if different:
        listed = "".join(f"\n    {line}" for line in different)
        raise UserError(
            f"out={path} holds a run with another configuration: choose another out=..., or mend{listed}"
        )
    status = read_info(path).get("status")
    return "done" if status in _OVER and not (grows and status == "done") else "resume"


def _same(old: Any, new: Any) -> bool:
    """Equal, where 1 is 1.0 and nan is nan, but True is not 1."""
    return isinstance(old, bool) == isinstance(new, bool) and (old == new or repr(old) == repr(new))


def _shown(config: dict, key: str) -> str:
    if key not in config:
        return "absent"
    value = config[key]
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _jsonable(value: Any, finite: bool = False) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item, finite) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_jsonable(item, finite) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return masked(value)
    value = plain(value)
    return str(value) if finite and isinstance(value, float) and not math.isfinite(value) else value

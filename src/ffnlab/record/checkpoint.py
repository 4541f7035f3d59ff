"""Checkpoints that are whole or not there: model.safetensors, trainer.pt, and a manifest of their hashes."""

import hashlib
import json
import re
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffnlab import foreign
from ffnlab.errors import UserError
from ffnlab.record.files import HashedFile, disk_error, free_bytes, full_disk, sync_folder
from ffnlab.record.tensors import load_weights, nbytes, pack

_STEP = re.compile(r"step-(\d{6,})")
_FILES = {"model.safetensors", "trainer.pt"}
_warned: set[Path] = set()


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When to save: model and trainer every `every` steps, of which the newest `keep_last` stay (None: all);
    the weights alone every `weights_every` steps, which all stay (None: never).
    """

    every: int
    keep_last: int | None
    weights_every: int | None

    def __post_init__(self):
        for name in ("every", "keep_last", "weights_every"):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"checkpoint.{name} must be a whole number of at least 1, got {value!r}.")


def save(root: Path, step: int, model: dict[str, Tensor], trainer: dict, keep_last: int | None) -> Path:
    """Write checkpoints/step-000500 of the run directory `root` and delete old ones; returns the new folder.

    `model` is a state dict; tensors that share memory are stored once, with a map of the other names.
    `trainer` holds plain tensors, numbers, strings, lists and dicts only (it is loaded with
    weights_only=True). All is written to a temporary folder, hashed, synced and renamed, the manifest last: a
    kill at any byte leaves the checkpoint before. Deleted are only checkpoints that this run wrote, never the
    one just written.

    Raises UserError when the disk has no room (with path and bytes), FloatingPointError when a weight is NaN:
    a poisoned checkpoint must not push out the last good one.
    """
    folder = root / "checkpoints"
    target = folder / f"step-{step:06d}"
    _refuse_nonfinite(model, target)
    size = nbytes(model) + nbytes(trainer)
    if free_bytes(folder) < size:
        raise full_disk(target, size)
    owner = _owner(root)
    temporary = folder / f".step-{step:06d}.tmp"
    try:
        _clear(folder)
        temporary.mkdir(parents=True)
        files = {
            "model.safetensors": _write(temporary / "model.safetensors", pack(model, step)),
            "trainer.pt": _write_trainer(temporary / "trainer.pt", trainer),
        }
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = {"format": 1, "step": step, "run": owner, "created": created, "files": files}
        _write(temporary / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
        sync_folder(temporary)
        if target.exists():  # an earlier save of this step that a resume found broken, or went back behind
            target.rename(folder / f".{target.name}.old")
        temporary.rename(target)
        sync_folder(folder)
        _clear(folder)
        _rotate(folder, target, owner, keep_last)
    except OSError as error:
        raise disk_error(target, size, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def save_weights(root: Path, step: int, model: dict[str, Tensor]) -> Path:
    """Write checkpoints/weights-000500.safetensors: weights that no rotation deletes."""
    path = root / "checkpoints" / f"weights-{step:06d}.safetensors"
    temporary = path.with_name(f".{path.name}.tmp")
    size = nbytes(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, pack(model, step))
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, size, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def resumable(root: Path) -> Path | None:
    """The checkpoint from which the run of this directory goes on: the newest complete one, None where none
    was saved yet. Raises UserError where there are some and all are broken.

    One that a save of the same step had moved aside when it was killed takes its name again: so this is only
    for the run itself.
    """
    folder = root / "checkpoints"
    for old in folder.glob(".step-*.old"):
        if not (target := old.with_name(old.name.removeprefix(".").removesuffix(".old"))).exists():
            old.rename(target)
    found = newest_complete(root)
    if found is None and (steps := _steps(folder)):
        raise UserError(
            f"{folder}: none of the {len(steps)} checkpoints is complete, so this run cannot go on. "
            "Put a copy back, or move the folder away to begin again at step 0"
        )
    return found


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint of the run directory `root` whose hashes hold; each broken one above it is warned
    of once.
    """
    for path in reversed(_steps(root / "checkpoints")):
        problem = broken(path)
        if problem is None:
            return path
        if path.resolve() not in _warned:
            _warned.add(path.resolve())
            warnings.warn(f"{path} is broken ({problem}) and not used.", stacklevel=2)
    return None


def broken(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: sizes and sha256 of its files against its manifest."""
    try:
        manifest = foreign.read_json(path / "manifest.json", path.parents[1])
        if (
            manifest["format"] != 1
            or path.name != f"step-{manifest['step']:06d}"
            or set(manifest["files"]) != _FILES
        ):
            return "its manifest.json is not ours"
        for name, claim in manifest["files"].items():
            size = foreign.inside(path / name, path.parents[1]).stat().st_size
            if size != claim["bytes"]:
                return f"{name} has {size:,} bytes instead of {claim['bytes']:,}"
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != claim["sha256"]:
                    return f"{name} does not have the sha256 of its manifest"
    except FileNotFoundError as error:
        return f"no {Path(error.filename).name}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json cannot be read: {error}"
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Model tensors (on the CPU, shared ones as the same object) and trainer state of one checkpoint.

    Raises UserError when it is not complete: never a half-loaded model.
    """
    problem = broken(path)
    if problem:
        raise UserError(f"{path} is not a complete checkpoint: {problem}.")
    try:
        trainer = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for one wrong file
        raise UserError(f"{path / 'trainer.pt'} is not a trainer state: {str(error)[:200]}") from None
    return load_weights(path / "model.safetensors"), trainer


def _write(path: Path, data: bytes) -> dict[str, Any]:
    file = HashedFile(path)
    try:
        file.write(data)
    finally:
        entry = file.close()
    return entry


def _write_trainer(path: Path, trainer: dict) -> dict[str, Any]:
    file = HashedFile(path)
    try:
        torch.save(trainer, file)  # type: ignore[arg-type]  # it only calls write and flush
    except RuntimeError:  # torch's own words for a write that failed; the cause is what the user can mend
        if file.error:
            raise file.error from None
        raise
    finally:
        entry = file.close()
    return entry


def _refuse_nonfinite(model: dict[str, Tensor], target: Path) -> None:
    bad = [
        name for name, tensor in model.items() if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if bad:
        raise FloatingPointError(
            f"{target} is not written: NaN or inf in {', '.join(bad[:3])} ({len(bad)} tensors)"
        )


def _steps(folder: Path) -> list[Path]:
    """The checkpoint folders, oldest step first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _owner(root: Path) -> str | None:
    """The id of the run, by which it knows its own checkpoints; None in a folder without run.json."""
    try:
        return foreign.read_json(root / "run.json", root).get("id")
    except FileNotFoundError:
        return None


def _clear(folder: Path) -> None:
    """Remove what a killed save left: our own hidden folders (the lock keeps other writers away)."""
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _rotate(folder: Path, newest: Path, owner: str | None, keep_last: int | None) -> None:
    if keep_last is None:
        return
    older = [path for path in _steps(folder) if path != newest and _written_by(path, owner)]
    for path in older[: max(0, len(older) - (keep_last - 1))]:
        with suppress(OSError):  # old checkpoints that stay are no reason to fail the new one
            (path / "manifest.json").unlink()  # first: a kill in between leaves nothing that looks complete
            shutil.rmtree(path)


def _written_by(path: Path, owner: str | None) -> bool:
    try:
        manifest = foreign.read_json(path / "manifest.json", path.parents[1])
        return manifest["format"] == 1 and manifest["run"] == owner
    except (OSError, ValueError, KeyError, TypeError):
        return False

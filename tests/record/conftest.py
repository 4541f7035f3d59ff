"""What the record's tests share: child processes, a small state to save, a reader of W&B's offline files."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def start(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts Python code (or a file) in a process of its own, which does not outlive the test."""
    children = []

    def run(code: str | Path, *arguments: object, **env: str) -> subprocess.Popen:
        program = [str(code)] if isinstance(code, Path) else ["-c", code]
        child = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root / "src"), **env},
        )
        children.append(child)
        return child

    yield run
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Model tensors with a tied head, and a trainer state, about 60 kB."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(64, 32, generator=generator)
    model = {"embed.weight": embed, "blocks.0.ffn.up.weight": torch.randn(128, 32, generator=generator)}
    model |= {"head.weight": embed}
    moments = {"exp_avg": torch.randn(128, 32, generator=generator), "step": torch.tensor(3.0)}
    return model, {
        "step": 3,
        "time_s": 1.5,
        "name": "adamw",
        "optim": {"state": {0: moments}},
        "rows": [1, None],
    }


@pytest.fixture
def wandb_records() -> Callable[[Path], list[Any]]:
    """Reads a .wandb file: 32 KiB blocks of records, each with a 7-byte head (crc, length, type)."""
    from wandb.proto import wandb_internal_pb2 as proto

    def pieces(data: bytes) -> Iterator[bytes]:
        assert data[:4] == b":W&B"
        at, whole = 7, b""
        while at + 7 <= len(data):
            room = 32768 - at % 32768
            if room < 7:
                at += room
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            piece = data[at + 7 : at + 7 + length]
            if kind == 0 or len(piece) < length:
                return
            at += 7 + length
            whole = piece if kind in (1, 2) else whole + piece
            if kind in (1, 4):
                yield whole

    def read(path: Path) -> list[Any]:
        return [proto.Record.FromString(piece) for piece in pieces(path.read_bytes())]

    return read


@pytest.fixture
def wandb_rows(wandb_records: Callable) -> Callable[[Path], list[dict[str, Any]]]:
    """The history of the one .wandb file in a folder, as flat rows; W&B may still be writing it."""

    def read(folder: Path) -> list[dict[str, Any]]:
        (path,) = folder.glob("*.wandb")
        until = time.monotonic() + 10
        while not any(record.HasField("exit") for record in wandb_records(path)) and time.monotonic() < until:
            time.sleep(0.02)
        items = [record.history.item for record in wandb_records(path) if record.HasField("history")]
        return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items]

    return read


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small disk of its own; skips where that is not allowed."""
    mounted = []

    def mount(options: str, name: str = "disk") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
        )
        if made.returncode:
            pytest.skip("needs the right to mount a file system")
        if not options.startswith("remount"):
            mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # -l: a reader may not be collected yet

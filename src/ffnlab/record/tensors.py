"""Named tensors in one safetensors file, shared ones once."""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.foreign import parse_json


def pack(model: dict[str, Tensor], step: int) -> bytes:
    """A safetensors file as bytes. Tensors that are the same memory (a tied head) are stored under the first
    of their names; the metadata entry `aliases` maps the other names to it.
    """
    stored: dict[str, Tensor] = {}
    first: dict[tuple, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.items():
        tensor = tensor.detach()
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            aliases[name] = first[place]
            continue
        first[place] = name
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        stored[name] = (
            tensor.contiguous() if whole else tensor.clone().contiguous()
        )  # a slice shares its storage
    metadata = {"format": "pt", "step": str(step), "aliases": json.dumps(aliases)}
    return in_order(safetensors.torch.save(stored, metadata))


def in_order(raw: bytes) -> bytes:
    """The same safetensors file with its metadata sorted: the library writes them in an order that changes
    from process to process, so that equal weights would not be equal files.
    """
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= end - 8
    return b"".join([raw[:8], text.ljust(end - 8), memoryview(raw)[end:]])


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors (on the CPU) of a file that `pack` made; shared names give the same object.

    Raises UserError when the file is not one.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            aliases = parse_json((file.metadata() or {}).get("aliases", "{}"))
        tensors = safetensors.torch.load_file(path)
        return tensors | {name: tensors[stored] for name, stored in aliases.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is not a file of weights: {error}") from None


def nbytes(state: Any) -> int:
    """Bytes of all tensors in a nest of dicts and lists, shared ones once."""
    tensors: dict[int, int] = {}

    def walk(node: Any) -> None:
        if isinstance(node, Tensor):
            tensors[node.data_ptr()] = node.nbytes
        elif isinstance(node, dict):
            for item in node.values():
                walk(item)
        elif isinstance(node, list | tuple):
            for item in node:
                walk(item)

    walk(state)
    return sum(tensors.values())

"""The store of neurons.zarr, opened only where reading it can run no code."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ffnlab.errors import UserError
from ffnlab.foreign import inside, parse_json, read_bytes

# zarr looks codecs up in a registry that packages add to, and numcodecs has one that unpickles.
CODECS = {"bytes", "zstd", "blosc", "gzip", "crc32c", "transpose", "sharding_indexed"}
NUMBERS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
NUMBERS |= {"float16", "float32", "float64"}
OLD = {".zarray", ".zgroup", ".zattrs", ".zmetadata"}  # of zarr 2, whose filters are any codec of numcodecs
MOST_METADATA = 2**20


def open_store(path: Path, mode: Literal["r", "a"] = "r") -> Any:
    """The root group of a zarr 3 store. UserError where it holds anything but arrays of numbers in CODECS,
    or a link that leads out of the run directory.
    """
    if path.exists() and (problem := next(strange(path), None)):
        raise UserError(
            f"{path}: {problem}, which no run of ffnlab writes and which may run code: move it away, or "
            "restore it from a copy"
        )
    import zarr  # half a second: only a run that records pays it

    return zarr.open_group(path, mode=mode, zarr_format=3)


def strange(path: Path) -> Iterator[str]:
    """What in a store is not ours, file by file."""
    if path.is_symlink():
        inside(path, path.parent)
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        for name in [*folders, *files]:
            if (here / name).is_symlink():
                yield f"{(here / name).relative_to(path)} is a link"
        for name in OLD.intersection(files):
            yield f"{(here / name).relative_to(path)} is of zarr 2"
        if "zarr.json" in files:
            yield from strange_metadata(here / "zarr.json", path)


def strange_metadata(file: Path, root: Path) -> Iterator[str]:
    """What in the description of one array or group is not ours; a torn one is left to zarr."""
    try:
        node = parse_json(read_bytes(file, root, MOST_METADATA))
    except UserError as error:
        yield f"{file.relative_to(root)} ({error})"
        return
    except ValueError:
        return
    name = file.relative_to(root)
    if not isinstance(node, dict):
        yield f"{name} is no mapping"
    elif node.get("consolidated_metadata"):
        yield f"{name} describes other arrays"
    elif node.get("storage_transformers"):
        yield f"{name} has storage transformers"
    elif node.get("node_type") == "array":
        if node.get("data_type") not in [*NUMBERS]:
            yield f"{name} has the type {str(node.get('data_type'))[:60]}"
        yield from (f"{name} has the codec {str(codec)[:60]}" for codec in strange_codecs(node.get("codecs")))


def strange_codecs(codecs: Any) -> Iterator[Any]:
    """The codecs that are not in CODECS, also those within a shard."""
    for codec in codecs if isinstance(codecs, list) else [codecs]:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if not isinstance(name, str) or name not in CODECS:
            yield name
        elif name == "sharding_indexed":
            inner = codec.get("configuration") if isinstance(codec, dict) else None
            for key in ("codecs", "index_codecs"):
                yield from strange_codecs(inner.get(key) if isinstance(inner, dict) else None)

"""A folder as transformers' `save_pretrained` writes it: config.json and safetensors, in one file or several.

Nothing in it can run code: json and safetensors are data, pickles are not opened, and no name in it leads out
of the folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from ffnlab import foreign
from ffnlab.errors import UserError
from ffnlab.formats.names import State

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")  # all of which fp32 holds exactly


class Stored(NamedTuple):
    """Where a tensor lies, and as what."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Folder:
    """What is in the folder, tensors by the names in its files."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]

    def load(self, names: Mapping[str, str]) -> State:
        """The tensors `names` (in the files) under their new names, in fp32."""
        out: State = {}
        for file in sorted({self.tensors[name].file for name in names}):
            try:
                with safetensors.safe_open(self.path / file, framework="pt") as stored:
                    for name, new in names.items():
                        if self.tensors[name].file == file:
                            out[new] = stored.get_tensor(name).to(torch.float32)
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"{self.path / file} cannot be read: {error}") from None
        return out


def open_folder(path: Path) -> Folder:
    """Read config.json and the headers of the safetensors; UserError for whatever is not as it should be."""
    if not path.is_dir():
        raise UserError(
            f"{path} is no folder; expected one that save_pretrained wrote (nothing is downloaded)"
        )
    config = read_json(path / "config.json")
    if (path / WHOLE).is_file():
        return Folder(path, config, header(path, WHOLE))
    if not (path / INDEX).is_file():
        raise UserError(no_weights(path))
    where = weight_map(path)
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for file in sorted(set(where.values())):
        tensors = header(path, file)
        problems += [
            f"{file}: {name} stands in {found[name].file} as well" for name in tensors.keys() & found
        ]
        found |= tensors
    for name in sorted(where.keys() | found):
        if (file := found[name].file if name in found else None) != where.get(name):
            problems.append(f"{name} lies in {file}; {INDEX} says {where.get(name)}")
    if problems:
        raise UserError(*problems)
    return Folder(path, config, found)


def no_weights(path: Path) -> str:
    """The message for a folder without safetensors."""
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        return (
            f"{path} holds {pickled[0]} and no safetensors: such files are pickles, which can run code, and "
            "are not opened. Save the model anew with save_pretrained(folder)"
        )
    return f"{path} holds neither {WHOLE} nor {INDEX}: expected a folder that save_pretrained wrote"


def read_json(path: Path) -> dict[str, Any]:
    """An object out of a json file."""
    try:
        content = foreign.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: expected a folder that save_pretrained wrote") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a json object")
    return content


def weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file of a model in several files; a file is a plain name in the folder, never a path."""
    entries = read_json(path / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{path / INDEX}: expected a weight_map from tensors to files")
    problems = []
    for file in sorted({str(file) for file in entries.values()}):
        if not foreign.plain_name(file) or not file.endswith(".safetensors"):
            problems.append(f"{INDEX}: {file!r} is not the name of a safetensors file in the folder")
        elif not (path / file).is_file():
            problems.append(f"{path / file} is missing; {INDEX} names it")
    if problems:
        raise UserError(*problems)
    return entries


def header(path: Path, file: str) -> dict[str, Stored]:
    """The tensors of one file, which is as long as its header says."""
    try:
        with safetensors.safe_open(foreign.inside(path / file, path), framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return {n: Stored(file, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path / file} is not a whole safetensors file: {error}") from None


def compare(found: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Each expected tensor is there in its shape and in a type that is read, and no other; else a UserError
    with all of them.
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not known in this family" for name in found if name not in expected]
    for name in found.keys() & expected:
        dtype, shape = found[name].dtype, found[name].shape
        if shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}; config.json makes it {list(expected[name])}")
        if dtype not in DTYPES:
            problems.append(f"{name} is stored as {dtype}; read are {', '.join(DTYPES)}")
    if problems:
        raise UserError(*sorted(problems))

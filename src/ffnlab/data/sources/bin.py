"""Token files as they lie on people's disks: nanoGPT's train.bin and val.bin, shards of llm.c."""

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ffnlab.data.cache import key, read_json
from ffnlab.data.encoders import CharTokenizer, Tokenizer
from ffnlab.data.shards import Tokens, dtype_for
from ffnlab.data.tokenfile import HEADERS, Header, checked, header_of, map_file
from ffnlab.data.tokenise import Opened
from ffnlab.data.tokenizers import GPT2, Recipe
from ffnlab.errors import UserError

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
GPT2_HEADER = HEADERS[20240520]
MOST = 1 << 32  # ids that uint32 can tell apart
SAMPLE_TOKENS = 1 << 20  # validation tokens decoded to learn the bytes per token

_PICKLE = (
    " meta.pkl lies there, but unpickling can run code, so it is not read. If you trust it, save its "
    "dictionary as meta.json."
)


class Bin:
    """A folder, a file or a glob of .bin files; `val` or `test` in the name of a file says what it is for.

    Without a val file the last val_frac of the tokens is held out; a test part lies in front of it.
    `vocab_size` may be null: then meta.json beside the files, the header (GPT-2, Llama 3) or
    `tokenizer=gpt2` or `byte` says it. `dtype` is that of files without a header, uint16 or uint32; null:
    uint16 up to 65,536 tokens, else uint32.
    """

    name = "bin"

    def __init__(self, *, path: str, vocab_size: int | None, dtype: str | None):
        if not isinstance(path, str) or not path.strip():
            raise UserError("data=bin needs a folder, a file or a glob of token files: data.path=my/shards")
        if vocab_size is not None and not 1 <= vocab_size <= MOST:
            raise UserError(f"data.vocab_size={vocab_size}: expected 1 to {MOST}, or null.")
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"data.dtype={dtype}: expected {' or '.join(DTYPES)}, or null.")
        self.path, self._vocab_size, self._dtype = path, vocab_size, dtype
        where = Path(path).expanduser()
        if where.is_file():
            self.files = [where]
        elif where.is_dir():
            self.files = sorted(where.glob("*.bin"))
        else:
            matches = map(Path, glob.glob(str(where), recursive=True))
            self.files = sorted(path for path in matches if path.suffix == ".bin" and path.is_file())
        if not self.files:
            raise UserError(
                f"data.path={path}: no token files there ({where.absolute()}). Expected a folder, a file or "
                "a glob of .bin."
            )

    def open(
        self,
        recipe: Recipe,
        val_frac: float,
        test_frac: float,
        cache: Path,
        progress: Callable[[str, float], None],
    ) -> Opened:
        """Map, check and split the files. A recipe that would have to be trained (bpe, char) is not used."""
        try:
            headers = [header_of(path) for path in self.files]
            vocab_size, tokenizer = self._vocabulary(recipe, headers)
            bare = DTYPES[self._dtype] if self._dtype else dtype_for(vocab_size)
            arrays = [map_file(path, header, bare) for path, header in zip(self.files, headers, strict=True)]
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}.") from error
        if self._dtype is None:
            refuse_halves(self.files, headers, arrays)
        files = []
        for number, (path, array) in enumerate(zip(self.files, arrays, strict=True)):
            progress(f"checking {path.name}", number / len(arrays))
            files.append(checked(path, array, cache, vocab_size))
        splits = self._splits(arrays, val_frac, test_frac)
        content = {
            "tokens": [file["sha256"] for file in files],
            "splits": {n: len(t) for n, t in splits.items()},
        }
        manifest = {
            "fingerprint": key(content),
            "source": {"name": self.name, "files": files},
            "tokenizer_hash": tokenizer.hash if tokenizer else None,
            "vocab_size": vocab_size,
            "eot": tokenizer.eot if tokenizer else None,
            "dtype": max(array.dtype.str for array in arrays),
            "splits": {name: {"tokens": len(tokens)} for name, tokens in splits.items()},
        }
        return Opened(splits, vocab_size, tokenizer, manifest, _bytes_per_token(tokenizer, splits["val"]))

    def _vocabulary(self, recipe: Recipe, headers: Sequence[Header | None]) -> tuple[int, Tokenizer | None]:
        said = headers[0] if len(set(headers)) == 1 else None
        meta_path = self.files[0].parent / "meta.json"
        meta = read_json(meta_path)
        if meta_path.exists() and meta is None:
            raise UserError(f'{meta_path} is not a json object; expected for example {{"vocab_size": 65}}.')
        tokenizer: Tokenizer | None = None
        if recipe.fit_on is None:
            tokenizer = recipe.fit(())
        elif meta and "stoi" in meta:
            tokenizer = _char_tokenizer(meta["stoi"], meta_path)
        elif (
            said
            and said == GPT2_HEADER
            and not meta
            and (self._vocab_size or said.vocab_size) >= said.vocab_size
        ):
            tokenizer = GPT2().fit(())
        size = (
            self._vocab_size
            or (meta or {}).get("vocab_size")
            or (tokenizer.vocab_size if tokenizer else said.vocab_size if said else None)
        )
        if not isinstance(size, int) or not 1 <= size <= MOST:
            raise UserError(
                f"data.path={self.path}: the vocabulary of these tokens is not known (got {size}). Give "
                'tokenizer=gpt2, data.vocab_size=N, or a file meta.json with {"vocab_size": N} beside them.'
                + (_PICKLE if (self.files[0].parent / "meta.pkl").exists() else "")
            )
        if tokenizer and tokenizer.vocab_size > size:
            raise UserError(
                f"data.vocab_size={size} is smaller than the {tokenizer.vocab_size} tokens of the tokenizer "
                f"of {self.path}."
            )
        return size, tokenizer

    def _splits(self, arrays: Sequence[np.ndarray], val_frac: float, test_frac: float) -> dict[str, Tokens]:
        groups: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for path, array in zip(self.files, arrays, strict=True):
            words = re.split(r"[^a-z]+", path.stem.lower())
            held_out = (
                "val" if {"val", "valid", "validation"} & set(words) else "test" if "test" in words else None
            )
            groups[held_out or "train"].append(array)
        train = Tokens(groups["train"])
        total = end = len(train)
        splits = {name: Tokens(groups[name]) for name in ("val", "test") if groups[name]}
        for name, fraction in (("val", val_frac), ("test", test_frac)):
            if name not in splits and fraction:
                start = end - round(total * fraction)
                splits[name] = train.part(start, end)
                end = start
        return {"train": train.part(0, end), **splits}


def refuse_halves(
    files: Sequence[Path], headers: Sequence[Header | None], arrays: Sequence[np.ndarray]
) -> None:
    """Raise a UserError for uint32 ids below 65,536 that were taken for uint16: every second one is 0."""
    for path, header, array in zip(files, headers, arrays, strict=True):
        halves = array[1:1024:2]
        if header is None and array.dtype.itemsize == 2 and len(halves) > 8 and not halves.any():
            raise UserError(
                f"{path}: read as uint16, every second id is 0, so these are probably uint32: set "
                "data.dtype=uint32, or data.dtype=uint16 if they are not."
            )


def _char_tokenizer(stoi: object, path: Path) -> CharTokenizer:
    """nanoGPT's character table: {"a": 0, ...} with the ids 0 ... n-1."""
    if isinstance(stoi, dict) and all(
        isinstance(token, int) and len(char) == 1 for char, token in stoi.items()
    ):
        characters = sorted(stoi, key=stoi.__getitem__)
        if [stoi[char] for char in characters] == list(range(len(characters))) and characters:
            return CharTokenizer("".join(characters), end_mark=False)
    raise UserError(f"{path}: stoi is not a table of single characters with the ids 0, 1, 2, ...")


def _bytes_per_token(tokenizer: Tokenizer | None, val: Tokens) -> float | None:
    if tokenizer is None or not len(val):
        return None
    sample = val.read(0, SAMPLE_TOKENS)
    if sample.max() >= tokenizer.vocab_size:  # padding of the vocabulary, which stands for no text
        return None
    ids, counts = np.unique(sample, return_counts=True)
    lengths = [0 if token == tokenizer.eot else len(tokenizer.token_bytes(token)) for token in ids.tolist()]
    return float(np.dot(lengths, counts) / len(sample))

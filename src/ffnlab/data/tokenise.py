"""A text source becomes shards: the tokenizer is made, the text is split, encoded in parallel and written."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ffnlab.data.cache import MANIFEST, cached, key, writable, write_json
from ffnlab.data.encoders import Tokenizer, load_tokenizer
from ffnlab.data.shards import ShardWriter, Tokens, dtype_for, open_shards
from ffnlab.data.sources.base import TextSource
from ffnlab.data.split import PIECE, Document, Split, pieces, split_documents
from ffnlab.data.tokenizers import Recipe
from ffnlab.errors import UserError

FORMAT = 1  # of shards and manifest: raised when the same input gives other tokens
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Opened:
    """Tokens by split, ready to be cut into windows, and what is known about them."""

    splits: dict[str, Tokens]
    vocab_size: int
    tokenizer: Tokenizer | None
    manifest: dict
    bytes_per_token: float | None  # of the validation split


def open_text(
    source: TextSource, recipe: Recipe, val_frac: float, test_frac: float, cache: Path, progress: Progress
) -> Opened:
    """Tokens of a text source: out of the cache, or tokenised into it first."""
    what = {
        "format": FORMAT,
        "source": source.describe(),
        "tokenizer": recipe.describe(),
        "val_frac": val_frac,
        "test_frac": test_frac,
    }
    name = f"{what['source']['name']}-{what['tokenizer']['name']}-{key(what)}"
    folder = cache / "tokens" / name
    manifest = cached(
        folder,
        lambda temporary: what | _tokenise(source, recipe, (val_frac, test_frac), temporary, progress),
        lambda: progress("waiting for another process that tokenises the same text", 0.0),
    )
    times = [shard["mtime_ns"] for split in manifest["splits"].values() for shard in split["shards"]]
    splits = {
        split: open_shards(folder, entry["shards"], manifest["dtype"])
        for split, entry in manifest["splits"].items()
    }
    if times != [shard["mtime_ns"] for split in manifest["splits"].values() for shard in split["shards"]]:
        _keep_times(folder / MANIFEST, manifest)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if tokenizer.hash != manifest["tokenizer_hash"]:
        raise UserError(
            f"the tokenizer in {folder} was changed after tokenising. Delete the folder to tokenise again."
        )
    return Opened(splits, tokenizer.vocab_size, tokenizer, manifest, manifest["bytes_per_token"].get("val"))


def _keep_times(path: Path, manifest: dict) -> None:
    try:
        write_json(path, manifest)
    except OSError:
        return  # a shared read-only cache: it is hashed again at the next start


def _tokenise(
    source: TextSource, recipe: Recipe, fractions: tuple[float, float], folder: Path, progress: Progress
) -> dict:
    started = time.monotonic()
    tokenizer = _make_tokenizer(source, recipe, fractions, progress)
    dtype = dtype_for(tokenizer.vocab_size)
    writers: dict[Split, ShardWriter] = {}
    total, done = source.total_bytes(), 0
    for chunk in _encoded(split_documents(_documents(source), *source.fractions(*fractions)), tokenizer):
        with writable(folder):
            for part in chunk:
                writer = writers.setdefault(part.split, ShardWriter(folder, part.split, dtype))
                writer.append(part.tokens)
                writer.bytes += part.bytes
                writer.documents += part.ends
                done += part.bytes
        progress(f"tokenising {source.name}: {done / 1e6:,.1f} MB", min(done / total, 1.0) if total else 0.0)
    with writable(folder):
        for writer in writers.values():
            writer.close()
        tokenizer.save(folder / "tokenizer.json")
    seconds = time.monotonic() - started
    progress(f"tokenised {source.name}: {done / 1e6:,.1f} MB in {seconds:.1f} s", 1.0)
    names = ("documents", "bytes", "tokens", "shards")
    content = {
        split: [shard["sha256"] for shard in writer.shards] for split, writer in sorted(writers.items())
    }
    return {
        "fingerprint": key({"tokenizer": tokenizer.hash, "splits": content}),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype,
        "seconds": round(seconds, 3),
        "bytes_per_token": {split: writer.bytes / writer.tokens for split, writer in writers.items()},
        "splits": {
            split: {name: getattr(writer, name) for name in names} for split, writer in writers.items()
        },
    }


def _documents(source: TextSource) -> Iterator[Document]:
    empty = True
    for document in source.documents():
        yield document
        empty = False
    if empty:
        raise UserError(
            f"{source.where()} holds no text: it is empty or all whitespace. Give text with data=text "
            "data.path=..."
        )


def _make_tokenizer(
    source: TextSource, recipe: Recipe, fractions: tuple[float, float], progress: Progress
) -> Tokenizer:
    if recipe.fit_on is None:
        return recipe.fit(())
    progress(f"reading {source.name} for the tokenizer", 0.0)
    if recipe.fit_on == "all":
        return recipe.fit(document.text for document in _documents(source))
    split = split_documents(_documents(source), *source.fractions(*fractions))
    tokenizer = recipe.fit(text for name, text in split if name == "train")
    progress(f"the text of {source.name} gives {tokenizer.vocab_size:,} tokens", 0.0)
    return tokenizer


class Part(NamedTuple):
    """Tokens of a piece of a document; `ends` where the document ends with it."""

    split: Split
    tokens: np.ndarray
    bytes: int
    ends: bool


Job = list[tuple[Split, str, bool]]


def _encode(tokenizer: Tokenizer, job: Job) -> list[Part]:
    parts = []
    for split, text, ends in job:
        tokens = tokenizer.encode_array(text)
        if ends and tokenizer.eot is not None:
            tokens = np.append(tokens, np.uint32(tokenizer.eot))
        parts.append(Part(split, tokens, len(text.encode()), ends))
    return parts


def _jobs(texts: Iterable[tuple[Split, str]]) -> Iterator[Job]:
    """Pieces of about equal size: short documents together, long ones in several."""
    job: Job = []
    size = 0
    for split, text in texts:
        cut = list(pieces(text))
        for number, piece in enumerate(cut, start=1):
            job.append((split, piece, number == len(cut)))
            size += len(piece)
            if size >= PIECE // 2:
                yield job
                job, size = [], 0
    if job:
        yield job


def _encoded(texts: Iterable[tuple[Split, str]], tokenizer: Tokenizer) -> Iterator[list[Part]]:
    """Encode on all cores, in order, with a bounded number of pieces in memory.

    Threads, not processes: tiktoken gives up the interpreter lock while it works, so threads use every core,
    start at once and copy no text.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[Future[list[Part]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for job in _jobs(texts):
            waiting.append(pool.submit(_encode, tokenizer, job))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

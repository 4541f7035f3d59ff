"""Batches as a pure function of (data seed, step): whatever the number of processes or the resumes."""

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ffnlab.data.shards import Tokens
from ffnlab.data.sources.base import TextSource
from ffnlab.data.sources.bin import Bin
from ffnlab.data.split import check_fractions
from ffnlab.data.tokenise import Opened, open_text
from ffnlab.data.tokenizers import Recipe
from ffnlab.errors import UserError

Batch = tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"]]


def open_dataset(
    source: TextSource | Bin,
    tokenizer: Recipe,
    *,
    val_frac: float,
    test_frac: float,
    seq_len: int,
    seed: int,
    cache: Path,
    progress: Callable[[str, float], None] | None,
) -> "Dataset":
    """Tokenise (once; see `cache_dir`) and open. `progress(what, fraction)` is told what takes time.

    Raises UserError for all that can be wrong with the text, the files, the fractions or the disk.
    """
    check_fractions(val_frac, test_frac)
    report = progress or (lambda what, fraction: None)
    if isinstance(source, Bin):
        opened = source.open(tokenizer, val_frac, test_frac, cache, report)
    else:
        opened = open_text(source, tokenizer, val_frac, test_frac, cache, report)
    return Dataset(opened, seq_len=seq_len, seed=seed)


class Dataset:
    """Windows of `seq_len` tokens, and their targets one position further on.

    Training: the windows of an epoch lie end to end from a random start and come in a random order; both
    follow from sha256(seed, epoch). Validation and test: end to end from the first token, in order.

    `fingerprint` is the same for the same tokens in the same splits. `bytes_per_token` is that of the
    validation text, None without a tokenizer: bits per byte = nats per token / ln 2 / bytes_per_token.
    """

    def __init__(self, opened: Opened, *, seq_len: int, seed: int):
        self.vocab_size = opened.vocab_size
        self.tokenizer = opened.tokenizer
        self.manifest = opened.manifest
        self.fingerprint: str = opened.manifest["fingerprint"]
        self.bytes_per_token = opened.bytes_per_token
        self.seq_len, self.seed = seq_len, seed
        self._train = opened.splits.get("train", Tokens([]))
        self._val = opened.splits.get("val", Tokens([]))
        self._test = opened.splits.get("test", Tokens([]))
        self._check_lengths()
        self._windows = max(1, (len(self._train) - seq_len) // seq_len)
        self._epoch = lru_cache(maxsize=2)(self._plan)

    def _check_lengths(self) -> None:
        splits = {"training": self._train, "validation": self._val} | (
            {"test": self._test} if len(self._test) else {}
        )
        short = {name: len(tokens) for name, tokens in splits.items() if len(tokens) < self.seq_len + 1}
        if short:
            raise UserError(
                *(
                    f"the {name} split has {count:,} tokens; model.seq_len={self.seq_len} needs at least "
                    f"{self.seq_len + 1:,}. Give more text, a smaller model.seq_len, or other "
                    "data.val_frac/test_frac."
                    for name, count in short.items()
                )
            )

    @property
    def n_train(self) -> int:
        """Training tokens."""
        return len(self._train)

    @property
    def n_val(self) -> int:
        """Validation tokens."""
        return len(self._val)

    @property
    def n_test(self) -> int:
        """Test tokens; 0 without a test split."""
        return len(self._test)

    @property
    def windows_per_epoch(self) -> int:
        """Training windows after which a new order begins."""
        return self._windows

    def _plan(self, epoch: int) -> tuple[int, np.ndarray]:
        """Start of the first window, and the order of the windows."""
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        # raw bits: the only random numbers that numpy promises to keep over its versions
        generator = np.random.PCG64(int.from_bytes(digest, "big"))
        slack = min(self.seq_len - 1, len(self._train) - 1 - self._windows * self.seq_len)
        offset = generator.random_raw() % (slack + 1)
        return offset, np.argsort(generator.random_raw(self._windows), kind="stable")

    def batch(
        self, step: int, batch_size: int, micro: int = 0, rank: int = 0, world: int = 1, grad_accum: int = 1
    ) -> Batch:
        """Micro-batch `micro` of process `rank` for update `step` >= 1: inputs, targets (batch_size, T).

        The windows of one update, (step-1) * G ... step * G - 1 with G = batch_size * world * grad_accum,
        depend on G only; epochs follow each other without a gap, also inside a batch.
        """
        if step < 1 or not 0 <= rank < world or not 0 <= micro < grad_accum:
            raise ValueError(f"no batch for {step=} {micro=} {rank=} {world=} {grad_accum=}")
        first = ((step - 1) * grad_accum * world + micro * world + rank) * batch_size
        starts = []
        for index in range(first, first + batch_size):
            offset, order = self._epoch(index // self._windows)
            starts.append(offset + int(order[index % self._windows]) * self.seq_len)
        return self._pairs(self._train, starts)

    def _pairs(self, tokens: Tokens, starts: list[int]) -> Batch:
        both = torch.from_numpy(np.stack([tokens.read(start, self.seq_len + 1) for start in starts]))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _spread(self, tokens: Tokens, count: int | None) -> list[int]:
        """Starts of `count` windows at even distances (all when None or too many), in order."""
        windows = (len(tokens) - 1) // self.seq_len
        wanted = windows if count is None else min(count, windows)
        return [i * windows // wanted * self.seq_len for i in range(wanted)]

    def _sequential(self, tokens: Tokens, batch_size: int, n_batches: int | None) -> Iterator[Batch]:
        starts = self._spread(tokens, None if n_batches is None else n_batches * batch_size)
        for first in range(0, len(starts), batch_size):
            yield self._pairs(tokens, starts[first : first + batch_size])

    def val_batches(self, batch_size: int, n_batches: int | None) -> Iterator[Batch]:
        """The validation windows in order: all of them, or `n_batches` batches spread evenly over the split.

        The last batch may have fewer rows; a rest shorter than a window is left out.
        """
        return self._sequential(self._val, batch_size, n_batches)

    def test_batches(self, batch_size: int, n_batches: int | None) -> Iterator[Batch]:
        """As `val_batches`, of the test split. Raises UserError when there is none."""
        if not len(self._test):
            raise UserError("there is no test split: set data.test_frac, for example data.test_frac=0.1.")
        return self._sequential(self._test, batch_size, n_batches)

    def probe_tokens(
        self, n_positions: int, n_windows: int = 4
    ) -> tuple[Int64[Tensor, "W T"], Bool[Tensor, "W T"]]:
        """Validation windows and a mask with exactly `n_positions` True, as `probe_mask` places them.

        Fewer windows are used when the split or `n_positions` has no more.
        """
        starts = self._spread(self._val, min(n_windows, n_positions))
        mask = probe_mask(n_positions, len(starts), self.seq_len)
        return self._pairs(self._val, starts)[0], mask

    def scan_tokens(self, n: int) -> Int64[Tensor, "W T"]:
        """At least `n` validation tokens: ceil(n / seq_len) windows, evenly spread (or all there are)."""
        if n < 1:
            raise UserError(f"probe.scan_tokens={n}: expected a positive number of tokens.")
        return self._pairs(self._val, self._spread(self._val, -(-n // self.seq_len)))[0]


def probe_mask(n_positions: int, n_windows: int, seq_len: int) -> Bool[Tensor, "W T"]:
    """`n_positions` True, in equal shares for the windows: positions 1, 3, 5, ... of each, closer together
    only where the window is too short for that.

    Attention is causal, so a pass may end after the last probed position. At nano 128 positions take 4 x 64
    tokens of 4 x 256, which halves the time of the pass (15 ms, of which 8 a single token takes). The
    contexts are of 2 to 64 tokens then; the scan has those of whole windows.
    """
    if not 1 <= n_positions <= n_windows * seq_len:
        raise UserError(
            f"probe.tokens={n_positions}: expected 1 to {max(1, n_windows) * seq_len} "
            f"({max(1, n_windows)} validation windows of {seq_len} tokens)."
        )
    mask = torch.zeros(n_windows, seq_len, dtype=torch.bool)
    for row in range(n_windows):
        share = n_positions // n_windows + (row < n_positions % n_windows)
        reach = min(seq_len, 2 * share)
        mask[row, [(i + 1) * reach // share - 1 for i in range(share)]] = True
    return mask

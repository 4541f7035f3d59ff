"""Batches: every window once an epoch, a pure function of (seed, step), for any number of processes."""

import numpy as np
import pytest
import torch

from ffnlab.data.dataset import Dataset
from ffnlab.data.shards import Tokens
from ffnlab.data.tokenise import Opened
from ffnlab.errors import UserError

T = 8


def dataset(n_train=1000, n_val=300, n_test=0, seed=0, seq_len=T) -> Dataset:
    """Token i is i: a window shows where it was cut."""
    lengths = {"train": n_train, "val": n_val, "test": n_test}
    splits = {name: Tokens([np.arange(n, dtype="<u2")]) for name, n in lengths.items()}
    return Dataset(Opened(splits, 65536, None, {"fingerprint": "-"}, None), seq_len=seq_len, seed=seed)


def starts(data: Dataset, step: int, batch_size: int, **place) -> list[int]:
    return data.batch(step, batch_size, **place)[0][:, 0].tolist()


def test_targets_are_the_next_tokens():
    x, y = dataset().batch(3, 4)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (4, T)
    assert (y == x + 1).all()


def test_an_epoch_shows_every_window_once():
    data = dataset(n_train=1003)
    n = data.windows_per_epoch
    assert n == (1003 - T) // T
    first = [start for step in range(1, n + 1) for start in starts(data, step, 1)]
    offset = min(first)
    assert offset < T
    assert sorted(first) == list(range(offset, offset + n * T, T))
    assert first != sorted(first)
    second = [start for step in range(n + 1, 2 * n + 1) for start in starts(data, step, 1)]
    assert len(set(second)) == n
    assert second != first


def test_epochs_follow_each_other_inside_a_batch():
    data = dataset()
    n = data.windows_per_epoch
    singles = [start for step in range(1, 2 * n + 1) for start in starts(data, step, 1)]
    batches = [start for step in range(1, 2 * n // 7 + 1) for start in starts(data, step, 7)]
    assert batches == singles[: len(batches)]


def test_pure_function_of_seed_and_step():
    a, b = dataset(), dataset()
    later = starts(a, 50, 4)
    assert starts(a, 2, 4) == starts(b, 2, 4)  # in whatever order the steps are asked for
    assert later == starts(b, 50, 4)
    assert starts(dataset(seed=1), 2, 4) != starts(a, 2, 4)


def test_order_is_what_it_always_was():
    """Pinned: a change here would make every run unrepeatable."""
    assert starts(dataset(), 1, 4) == [363, 659, 651, 467]


@pytest.mark.parametrize(
    ("world", "grad_accum", "batch_size"), [(1, 4, 2), (2, 2, 2), (4, 1, 2), (1, 1, 8), (2, 1, 4)]
)
def test_same_windows_for_any_number_of_processes(world, grad_accum, batch_size):
    data = dataset()
    for step in (1, 17, 40):
        together = [
            start
            for micro in range(grad_accum)
            for rank in range(world)
            for start in starts(
                data, step, batch_size, micro=micro, rank=rank, world=world, grad_accum=grad_accum
            )
        ]
        assert together == starts(data, step, 8)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step=0"):
        dataset().batch(0, 4)


@pytest.mark.parametrize("n_train", [T + 1, T + 2, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T])
def test_smallest_texts(n_train):
    data = dataset(n_train=n_train)
    for step in range(1, 20):
        x, y = data.batch(step, 3)
        assert (y == x + 1).all()
        assert int(y.max()) < n_train


def test_too_short():
    with pytest.raises(UserError, match=r"validation split has 8 tokens; model\.seq_len=8 needs at least 9"):
        dataset(n_val=T)
    with pytest.raises(UserError, match="the test split has 3 tokens"):
        dataset(n_test=3)


def test_validation_is_all_windows_in_order_with_a_ragged_end():
    data = dataset(n_val=300)  # 37 windows
    batches = list(data.val_batches(8, None))
    assert [len(x) for x, _ in batches] == [8, 8, 8, 8, 5]
    assert torch.cat([x for x, _ in batches]).flatten().tolist() == list(range(37 * T))
    assert all((y == x + 1).all() for x, y in batches)


def test_some_validation_batches_are_spread_and_fixed():
    data = dataset(n_val=300)
    firsts = [int(x[0, 0]) for x, _ in data.val_batches(1, 4)]
    assert firsts == [0, 9 * T, 18 * T, 27 * T]
    assert firsts == [int(x[0, 0]) for x, _ in dataset(n_val=300, seed=5).val_batches(1, 4)]
    assert len(list(data.val_batches(8, 100))) == 5


def test_test_split_only_when_there_is_one():
    with pytest.raises(UserError, match=r"data\.test_frac"):
        dataset().test_batches(4, None)
    assert len(list(dataset(n_test=100).test_batches(4, None))) == 3


@pytest.mark.parametrize("n", [1, 3, 4, 5, 17, 31, 32])
def test_probe_has_exactly_n_positions_early_in_the_windows(n):
    x, mask = dataset().probe_tokens(n)
    assert x.shape == mask.shape == (min(4, n), T)
    assert int(mask.sum()) == n
    for row in mask:
        share = int(row.sum())
        assert share in (n // len(mask), -(-n // len(mask)))
        places = row.nonzero().flatten()
        assert places[-1] == min(T, 2 * share) - 1
        assert places.diff().tolist() == [2] * (share - 1) or 2 * share > T
    assert torch.equal(x, dataset(seed=9).probe_tokens(n)[0])


def test_probe_and_scan_out_of_range():
    for n in (0, -1, 33):
        with pytest.raises(UserError, match=r"probe\.tokens"):
            dataset().probe_tokens(n)
    with pytest.raises(UserError, match="1 to 8"):
        dataset(n_val=T + 1).probe_tokens(9)
    with pytest.raises(UserError, match="scan_tokens"):
        dataset().scan_tokens(0)


def test_scan():
    data = dataset(n_val=300)
    assert data.scan_tokens(17).shape == (3, T)
    assert data.scan_tokens(10**6).shape == (37, T)


def test_tokens_across_arrays():
    tokens = Tokens([np.arange(5), np.arange(0), np.arange(5, 6), np.arange(6, 20)])
    assert len(tokens) == 20
    for start in range(20):
        for length in range(1, 21 - start):
            assert tokens.read(start, length).tolist() == list(range(start, start + length))
            assert tokens.part(start, start + length).read(0, length).tolist() == list(
                range(start, start + length)
            )
    assert tokens.read(18, 9).tolist() == [18, 19]
    assert len(Tokens([])) == 0

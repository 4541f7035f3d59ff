"""Several processes, one run: torchrun starts them, each computes its part of a batch, the sums are shared.

One process is the case of all this with nothing to share.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ffnlab.errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process among `size`; the one of rank 0 leads: it alone writes."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"  # where messages must lie

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes: one message, equal to the bit everywhere."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).to(self.device) for t in tensors])
        dist.all_reduce(flat)
        for t, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(total.view_as(t))

    def highest(self, value: int) -> int:
        """The highest value that any process has."""
        if self.size == 1:
            return value
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        box: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(box, value)
        return box

    def from_leader(self, value: Any) -> Any:
        """The leader's value, in every process."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Those that torchrun started with this one; alone without it. `device` is `train.device`."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    if missing := {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        raise UserError(
            f"WORLD_SIZE={size} but {', '.join(sorted(missing))} is not set: start with "
            "torchrun --nproc_per_node=N train.py ..., or unset WORLD_SIZE"
        )
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield Processes(dist.get_rank(), size, "cuda" if on_cuda else "cpu")
    finally:
        dist.destroy_process_group()

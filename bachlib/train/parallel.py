"""Data-parallel training: torchrun starts the processes, `group` joins them (gloo on CPU, nccl on CUDA).

Each process takes its share of the rows of every batch, and gradients are averaged. All processes draw the same batch
from the same seed, so each knows the positives of the others and adds them to its negatives. Two processes with B/2
rows each therefore take the same step as one process with B rows, up to rounding and dropout masks.
"""

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bachlib import BachError


class Group:
    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Is this the process that writes files and prints?"""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        if batch_size % self.size:
            raise BachError(f"batch_size={batch_size} should be a multiple of the {self.size} processes")
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def average(self, parameters: list[Tensor], *extra: float | Tensor) -> list[float]:
        """Average all gradients in place, and the numbers `extra`, in one message."""
        if self.size == 1:
            return [float(x) for x in extra]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        numbers = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=gradients[0].device) for x in extra])
        flat = torch.cat([g.flatten().float() for g in gradients] + [numbers])
        dist.all_reduce(flat)
        flat /= self.size
        *pieces, numbers = flat.split([*(g.numel() for g in gradients), len(extra)])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
        return numbers.tolist()

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the first process to all others."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def sum(self, value: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def extremes(self, low_high: Tensor) -> Tensor:
        """(smallest of the first, largest of the second) over all processes."""
        both = torch.stack([-low_high[0], low_high[1]])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return torch.stack([-both[0], both[1]])

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def chosen_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise BachError("device='cuda': torch finds no GPU; device='auto' uses a GPU only if there is one")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # torchrun: one GPU per process
    torch.cuda.set_device(device)
    return device


@contextmanager
def group(device: torch.device) -> Iterator[Group]:
    """The processes that torchrun has started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Group()
        return
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # once per program, however often it trains
    yield Group(dist.get_rank(), dist.get_world_size())

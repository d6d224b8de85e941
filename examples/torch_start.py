"""Joins a job with `torch.distributed`: what the examples of PyTorch share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from digits.errors import ExampleError

__all__ = ["print_digest", "process_group"]


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Join the job that torchrun or `netstorm launch` has started, and leave it if all went well.

    Raises:
        ExampleError: nobody has started a job, or there is no such backend.
    """
    if "RANK" not in os.environ:
        raise ExampleError(
            "RANK is not set: start it with `torchrun --nproc-per-node 4` or `netstorm launch -n 4 -- python`"
        )
    known = dist.Backend.backend_list
    if ":" not in backend and backend not in known:  # not a form such as "cpu:gloo,cuda:nccl"
        raise ExampleError(f"--backend {backend}: PyTorch has {', '.join(known)} here")
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()


def print_digest(weights: Mapping[str, torch.Tensor]) -> None:
    """Print the SHA-256 of a model's names and values: equal at two ranks if their models are."""
    total = hashlib.sha256()
    for name, value in sorted(weights.items()):
        total.update(name.encode() + value.detach().numpy().tobytes())
    # In one write, newline and all: ranks may share a terminal.
    print(f"rank {dist.get_rank()}: weights sha256 {total.hexdigest()}\n", end="", flush=True)

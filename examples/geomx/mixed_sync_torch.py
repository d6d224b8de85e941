#!/usr/bin/env python3
"""MixedSync with PyTorch: ranks of a site in step, and no site waits for another one.

netstorm launch -n 4 --site a,a,b,b -- python examples/geomx/mixed_sync_torch.py --slow 4

With --slow the last rank's site is slower than the others, so that there is something to see.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from torch import nn

from digits.data import load
from digits.errors import usage_errors
from digits.options import positive_number, whole_number
from digits.shards import Shard
from netstorm.frontends.torch.asynchronous import MixedSync
from torch_digits import accuracy, cnn, tensors
from torch_start import process_group

_STEP_S = 0.05
"""Of the other sites with --slow: more than this small network needs."""


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="MixedSync: no site waits for another one.")
    add = parser.add_argument
    add("-lr", "--learning-rate", type=positive_number, default=0.02)
    add("-bs", "--batch-size", type=whole_number, default=16, help="samples in a batch of one rank")
    add("-ep", "--epoch", type=whole_number, default=5)
    add("-dc", "--dcasgd", action="store_true", help="correct late gradients (DCASGD)")
    add("--slow", type=positive_number, help="how much slower the last rank's site is; steps are slept")
    given = parser.parse_args()
    with usage_errors(), process_group("netstorm"):
        train(given)


def train(given: argparse.Namespace) -> None:
    """Train on this rank's shard; rank 0 says how good the network is, and each rank how far it has come."""
    data = load("digits", None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = Shard(data.train, rank=rank, ranks=ranks, batch_size=given.batch_size, seed=1)
    net, loss_of = cnn(data), nn.CrossEntropyLoss()
    training = MixedSync(net, given.learning_rate, momentum=0.9, lamda=0.04 if given.dcasgd else 0.0)
    step_s = 0.0
    if given.slow is not None:
        step_s = _STEP_S * (given.slow if ranks - 1 in training.ranks else 1)
    begun = time.monotonic()
    for epoch in range(given.epoch):
        for images, labels in shard.batches(epoch):
            began = time.monotonic()
            pixels, classes = tensors((images, labels), data.white)
            net.zero_grad()
            loss_of(net(pixels), classes).backward()
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            training.step()
        if rank == 0:
            print(
                f"[Time {time.monotonic() - begun:.3f}][Epoch {epoch}][Iteration {training.steps}] "
                f"Test Acc {accuracy(net, data, 64):.4f}",
                flush=True,
            )
    print(f"rank {rank}: {training.steps} steps in {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()

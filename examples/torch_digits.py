#!/usr/bin/env python3
"""Trains a network with PyTorch's DistributedDataParallel on one or many nodes.

torchrun --nproc-per-node 4 examples/torch_digits.py
netstorm launch -n 4 -- python examples/torch_digits.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits.data import Dataset, load
from digits.errors import usage_errors
from digits.progress import progress_of
from digits.recorder import Recorder
from digits.shards import Batch, Shard, in_order
from digits.torch_models import AlexNet
from digits.torch_options import TorchOptions, optimizer_of, parse
from torch_start import process_group


def main() -> None:
    """Train as the command line says."""
    options = parse("Trains a network with DistributedDataParallel on one or many nodes.")
    with usage_errors():
        data = load(options.dataset, options.data_dir)
        with process_group(options.backend):  # init_process_group, with clear errors
            train(options, data)


def train(options: TorchOptions, data: Dataset) -> None:
    """Train on this rank's shard, together with the other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = Shard(data.train, rank=rank, ranks=ranks, batch_size=options.batch_size, seed=options.seed)
    torch.manual_seed(options.seed + rank)  # DDP gives all ranks the first one's weights
    net = DistributedDataParallel(network(options, data))
    optimizer = optimizer_of(options, net.parameters())
    loss_of = nn.CrossEntropyLoss()

    recorder = Recorder("torch", options, rank=rank, ranks=ranks)
    progress = progress_of(
        rank=rank, epochs=options.epochs, steps=shard.steps, samples_per_step=options.batch_size * ranks
    )
    with progress:
        for epoch in range(options.epochs):
            total = 0.0
            for step, batch in enumerate(shard.batches(epoch), 1):
                images, labels = tensors(batch, data.white)
                loss = loss_of(net(images), labels)
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients of all ranks while it runs
                optimizer.step()
                total += loss.item()
                progress.step(total / step)
            progress.finish_epoch(accuracy(net.module, data, options.batch_size) if rank == 0 else None)
            recorder.epoch(progress.results)
    recorder.end(progress.results, {name: value.numpy() for name, value in net.module.state_dict().items()})


def network(options: TorchOptions, data: Dataset) -> nn.Module:
    """Return the network that the command line names.

    Raises:
        ExampleError: the images would be too small for it.
    """
    return AlexNet(data.classes, options.image_size) if options.model == "alexnet" else cnn(data)


def cnn(data: Dataset) -> nn.Module:
    """Return a small network, for images of any size from 4 pixels."""
    channels = data.train.images.shape[1]
    net = nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, data.classes),
    )
    for name, value in net.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(value)
    return net


def tensors(batch: Batch, white: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's images, with pixels from 0 to 1, and its classes."""
    images, labels = batch
    return torch.from_numpy(images).float() / white, torch.from_numpy(labels).long()


@torch.no_grad()
def accuracy(net: nn.Module, data: Dataset, batch_size: int) -> float:
    """Return the share of test samples that the network gets right."""
    net.eval()
    right = 0
    for batch in in_order(data.test, batch_size):
        images, labels = tensors(batch, data.white)
        right += int((net(images).argmax(1) == labels).sum())
    net.train()
    return right / len(data.test)


if __name__ == "__main__":
    main()

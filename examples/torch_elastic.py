#!/usr/bin/env python3
"""Trains while ranks die, come back and join: a small CNN on digits, or a small GPT.

NETSTORM_ELASTIC=2:4 netstorm launch -n 4 --restarts 3 -- python examples/torch_elastic.py

Kill a rank, and the others go on without it; the launcher starts it again, and it joins. More may join from
other machines, as long as there are fewer than 4:

NETSTORM_ELASTIC=2:4 DMLC_NUM_WORKER=4 DMLC_PS_ROOT_URI=host DMLC_PS_ROOT_PORT=port python torch_elastic.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from digits.data import Dataset, load
from digits.errors import usage_errors
from digits.options import positive_number, whole_number
from gpt.model import GPT
from gpt.text import load_text
from netstorm.frontends.torch import elastic
from torch_digits import accuracy, cnn, tensors
from torch_start import print_digest

CONTEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained."""

    model: nn.Module
    samples: int
    loss_of: Callable[[nn.Module, list[int]], Any]
    """Returns the loss of some samples."""
    result: Callable[[], str]
    """Says how good the model is."""


def main() -> None:
    """Train as the command line says."""
    options = parse()
    with usage_errors():
        elastic.init_process_group()
        train(options, (gpt if options.model == "gpt" else digits)(options.seed))
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(description="Trains while ranks die, come back and join.")
    add = parser.add_argument
    add("--model", choices=("digits", "gpt"), default="digits")
    add("--steps", type=whole_number, default=300)
    add("--batch-size", type=whole_number, default=16, help="samples in a batch of one rank")
    add("--lr", type=positive_number, default=3e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=1, help="of initial weights and of the order of samples")
    add("--report", type=whole_number, default=20, metavar="STEPS", help="how often a rank writes a line")
    return parser.parse_args()


def train(options: argparse.Namespace, task: Task) -> None:
    """Train together with the ranks that are there."""
    rank = dist.get_rank()
    model = elastic.data_parallel(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    sampler = elastic.ElasticSampler(task.samples, options.batch_size, seed=options.seed)
    state = elastic.ElasticState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    if elastic.is_newcomer():
        print(f"rank {rank} joins", flush=True)
    began = time.monotonic()
    while (step := state.step()) < options.steps:  # a rank that joins later begins with the others' step
        optimizer.zero_grad()
        loss = task.loss_of(model, sampler.take())
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % options.report == 0:
            ranks = ", ".join(map(str, state.ranks))
            line = f"rank {rank}: step {step}/{options.steps}  loss {loss.item():.4f}  of ranks {ranks}"
            print(line, flush=True)
    print(f"rank {rank}: {task.result()} after {time.monotonic() - began:.1f} s", flush=True)
    print_digest(task.model.state_dict())


def digits(seed: int) -> Task:
    """Return a CNN to be trained on handwritten digits."""
    data = load("digits", None)
    torch.manual_seed(seed)
    net = cnn(data)

    def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
        images, labels = tensors((data.train.images[samples], data.train.labels[samples]), data.white)
        return nn.functional.cross_entropy(model(images), labels)

    return Task(model=net, samples=len(data.train), loss_of=loss_of, result=lambda: _accuracy_text(net, data))


def _accuracy_text(net: nn.Module, data: Dataset) -> str:
    return f"accuracy {accuracy(net, data, 100):.4f}"


def gpt(seed: int) -> Task:
    """Return a GPT to be trained on the source code of Python's standard library."""
    text = load_text()
    torch.manual_seed(seed)
    net = GPT(context=CONTEXT, width=64, layers=2, heads=4)
    last = len(text) - 40 * CONTEXT  # what follows is for the result

    def loss_at(model: nn.Module, starts: torch.Tensor) -> torch.Tensor:
        sample = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss: torch.Tensor = model(sample[:, :-1], sample[:, 1:])
        return loss

    @torch.no_grad()
    def result() -> str:
        return f"loss {loss_at(net, torch.arange(last, len(text) - CONTEXT - 1, CONTEXT)).item():.4f}"

    return Task(
        model=net,
        samples=last // CONTEXT,
        loss_of=lambda model, samples: loss_at(model, torch.tensor(samples) * CONTEXT),
        result=result,
    )


if __name__ == "__main__":
    main()

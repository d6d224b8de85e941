#!/usr/bin/env python3
"""Trains a small character GPT on the source code of Python's standard library, with DDP or DiLoCo.

torchrun --nproc-per-node 4 examples/torch_gpt.py
netstorm launch -n 4 -- python examples/torch_gpt.py --diloco 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from digits.errors import ExampleError, usage_errors
from digits.options import whole_number
from gpt.checkpoints import Checkpoints
from gpt.model import GPT
from gpt.options import add_gpt_options
from gpt.report import Report
from gpt.text import Batches, load_text
from torch_start import print_digest, process_group


def main() -> None:
    """Train as the command line says."""
    options = parse()
    with usage_errors():
        if options.width % options.heads:
            raise ExampleError(f"--width {options.width}: expected a multiple of --heads {options.heads}")
        with process_group(options.backend):
            model = train(options)
            if options.digest:
                print_digest(model.state_dict())


def parse() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(description="Trains a small character GPT with DDP or DiLoCo.")
    add_gpt_options(parser)
    add = parser.add_argument
    add("--diloco", type=whole_number, metavar="STEPS", help="DiLoCo that synchronises so often, not DDP")
    add("--codec", type=codec, help="how gradients travel, DDP's or DiLoCo's: int8, topk, ..., or JSON")
    add("--delay", type=int, default=0, metavar="STEPS", help="how long DiLoCo's sums may take")
    add("--checkpoint", type=Path, metavar="FOLDER", help="where each rank writes checkpoints")
    add("--checkpoint-every", type=whole_number, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="go on from the newest checkpoint in FOLDER, if there is one")
    add("--digest", action="store_true", help="each rank prints the SHA-256 of its final weights")
    options = parser.parse_args()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint FOLDER")
    return options


def train(options: argparse.Namespace) -> torch.nn.Module:
    """Train together with the other ranks, and return the model, which is the same at all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    model = GPT(context=options.context, width=options.width, layers=options.layers, heads=options.heads)
    inner = torch.optim.AdamW(model.parameters(), lr=options.lr)
    trained: Any = model
    diloco: Any = None
    if options.diloco:
        diloco = diloco_of(model, inner, options)
    else:
        trained = DistributedDataParallel(model)
    parts: dict[str, Any] = {"model": model, "optimizer": inner, **({"diloco": diloco} if diloco else {})}
    if options.codec is not None and not options.diloco:
        parts["codec"] = compress(trained, options)
    checkpoints = Checkpoints(options.checkpoint, rank) if options.checkpoint else None
    done = checkpoints.load(parts) if checkpoints and options.resume else 0

    batches = Batches(
        text=load_text(),
        rank=rank,
        batch_size=options.batch_size,
        context=options.context,
        seed=options.seed,
    )
    report = Report(
        rank=rank,
        steps=options.steps,
        every=options.report,
        tokens_per_step=ranks * options.batch_size * options.context,
    )
    with diloco or contextlib.nullcontext():
        for step, (inputs, targets) in enumerate(batches.steps(done, options.steps), done + 1):
            inner.zero_grad()
            loss = trained(inputs, targets)
            loss.backward()
            inner.step()  # every so often it also synchronises, with DiLoCo
            report.step(step, loss.item())
            if checkpoints and (step % options.checkpoint_every == 0 or step == options.steps):
                checkpoints.save(step, parts)
        if diloco:
            diloco.sync()
            diloco.load_global_parameters()
    return model


def codec(text: str) -> Any:
    """Return a codec's name; or what JSON says, such as {"*.bias": "none", "*": "int8"}."""
    return json.loads(text) if text.startswith("{") else text


def compress(model: DistributedDataParallel, options: argparse.Namespace) -> Any:
    """Have the gradients of a model travel under a codec; return what keeps its state.

    Raises:
        ExampleError: there is no such codec, or it needs another backend.
    """
    from netstorm.frontends.torch.gradient_codecs import (  # noqa: PLC0415 - for this alone
        CodecHookState,
        codec_hook,
    )

    try:
        state = CodecHookState(options.codec, model)
    except ValueError as error:  # NetStorm's UsageError
        raise ExampleError(f"--codec {options.codec}: {error}") from error
    model.register_comm_hook(state, codec_hook)
    return state


def diloco_of(model: GPT, inner: torch.optim.Optimizer, options: argparse.Namespace) -> Any:
    """Return DiLoCo over the model's parts, one of which is synchronised at a time.

    Raises:
        ExampleError: an option of DiLoCo's is wrong.
    """
    from netstorm.frontends.torch.local_updates import DiLoCo  # noqa: PLC0415 - DDP does without

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    try:
        return DiLoCo(
            [model.embedding, *model.blocks, model.head],
            inner,
            outer,
            sync_every=options.diloco,
            fragment_sync_delay=options.delay,
            codec="float32" if options.codec is None else options.codec,
        )
    except ValueError as error:  # NetStorm's UsageError
        raise ExampleError(f"--diloco {options.diloco}: {error}") from error


if __name__ == "__main__":
    main()

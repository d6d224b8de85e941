"""One rank of `studies/torch_codecs.py`: trains the GPT of the examples with DDP, under one codec after the
other.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt.model import GPT
from gpt.text import Batches, load_text
from harness.serving import Answer, serve
from netstorm.frontends.torch.gradient_codecs import CodecHookState, codec_hook
from systems.torch_ddp import join_group

_BEFORE = 2
"""Steps whose bytes do not count: DDP makes its final buckets, and keys become known."""


def _bytes_sent() -> float:
    """Return the bytes that this rank has sent, once all ranks have done their steps."""
    dist.barrier()
    group: Any = dist.group.WORLD
    sent: float = group.member.runtime.statistics()["bytes_sent"]
    dist.barrier()
    return sent


def _train(command: Answer, text: torch.Tensor) -> Answer:
    torch.manual_seed(command["seed"])
    context, steps = 64, command["steps"]
    model = GPT(context=context, width=command["width"], layers=command["layers"], heads=4)
    trained = DistributedDataParallel(model)
    trained.register_comm_hook(CodecHookState(command["codec"], model), codec_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(
        text=text,
        rank=dist.get_rank(),
        batch_size=command["batch_size"],
        context=context,
        seed=command["seed"],
    )
    losses, sent, began = [], 0.0, 0.0
    for step, (inputs, targets) in enumerate(batches.steps(0, steps)):
        if step == _BEFORE:
            sent, began = _bytes_sent(), time.monotonic()
        optimizer.zero_grad()
        loss = trained(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    took = time.monotonic() - began
    return {
        "bytes": (_bytes_sent() - sent) / (steps - _BEFORE),
        "step_s": took / (steps - _BEFORE),
        "losses": losses,
        "parameters": sum(math.prod(value.shape) for value in model.parameters()),
    }


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job."""
    join_group("netstorm")
    text = load_text()
    return {"rank": dist.get_rank()}, lambda command: _train(command, text)


if __name__ == "__main__":
    serve(join)

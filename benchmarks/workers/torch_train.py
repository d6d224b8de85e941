"""One rank of `train.py --framework torch`: trains a small GPT, some steps on command.

Commands: prepare (what is not timed), train (some steps: their start and end), loss (rank 0: that of the
model on text which nobody trains on).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from gpt.model import GPT
from gpt.text import Batches, load_text
from harness.serving import Answer, serve
from systems.base import Case
from workers.torch_outer import EXCHANGES, Setting

_SEED = 1
_HELD_OUT = 100_000
"""Characters at the end of the text, which nobody trains on."""
_MEASURED = 128
"""Samples of them that a loss is the mean of."""
_LAST_STEP = 1_000_000


class Training:
    """A model, its optimizer, this rank's samples and the other ranks."""

    def __init__(self, name: str, case: Case, shape: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        context = shape["context"]
        self.pause_s = shape["pause"]
        self.plain = GPT(context=context, width=shape["width"], layers=shape["layers"], heads=4)
        self.inner = torch.optim.AdamW(self.plain.parameters(), lr=shape["lr"])
        self.exchange = EXCHANGES[name](Setting(case, self.plain, self.inner, shape["sync_every"]))
        text = load_text()
        self.batches = Batches(
            text=text[:-_HELD_OUT],
            rank=self.exchange.rank,
            batch_size=shape["batch_size"],
            context=context,
            seed=_SEED,
        ).steps(0, _LAST_STEP)
        held = Batches(text=text[-_HELD_OUT:], rank=0, batch_size=_MEASURED, context=context, seed=_SEED)
        self.held_out = next(iter(held.steps(0, 1)))

    def do(self, command: Answer) -> Answer:
        """Do one command."""
        if command["do"] == "prepare":
            self.exchange.prepare()
            return {}
        if command["do"] == "loss":
            return {"loss": self.loss() if self.exchange.rank == 0 else None}
        return self.train(command["steps"])

    def train(self, steps: int) -> Answer:
        """Take some steps."""
        start = time.monotonic()
        for _, (inputs, targets) in zip(range(steps), self.batches, strict=False):
            self.inner.zero_grad()
            loss = self.exchange.model(inputs, targets)
            time.sleep(self.pause_s)
            loss.backward()
            self.inner.step()
            self.exchange.after_step()
        return {"start": start, "finish": time.monotonic()}

    def loss(self) -> float:
        """Return the mean loss on text that nobody trains on, in nats a character."""
        with torch.no_grad():
            return float(self.plain(*self.held_out))


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job that the command line describes."""
    name, nodes, size, shape = sys.argv[1:]
    training = Training(name, Case(nodes=int(nodes), bytes=int(size)), json.loads(shape))
    return {"rank": training.exchange.rank}, training.do


if __name__ == "__main__":
    serve(join)

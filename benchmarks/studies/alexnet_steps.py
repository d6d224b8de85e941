#!/usr/bin/env python3
"""How many steps AlexNet needs to an accuracy with the paper's settings, all ranks in one process.

    python benchmarks/studies/alexnet_steps.py --json alexnet-steps.json

Adam, 1e-4, batches of 32 at each of nine ranks, as NetStorm §IX-A; on scikit-learn's digits, enlarged to 63
pixels, the least that AlexNet's poolings leave something of. Its first dense layer has 256 inputs then, not
9216. Synchronous sums are those of one batch of all ranks, so a step is the same with any store: times to the
accuracy are these steps times the time of a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.data import load
from digits.torch_models import AlexNet
from harness.arguments import number, writable

_RANKS: Final = 9
_BATCH: Final = 32
_PIXELS: Final = 63
_EVERY: Final = 4
"""Steps between two looks at the test samples."""


def steps_to(target: float, seed: int, most: int) -> int | None:
    """Return after how many steps a training has reached an accuracy, within `most`."""
    torch.manual_seed(seed)
    data = load("digits", None)
    images, tests = (
        torch.tensor(one.images / data.white, dtype=torch.float32) for one in (data.train, data.test)
    )
    classes, test_classes = (torch.tensor(one.labels.astype(np.int64)) for one in (data.train, data.test))
    net = AlexNet(data.classes, _PIXELS)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    for step in range(1, most + 1):
        chosen = torch.randint(len(images), (_RANKS * _BATCH,))
        optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(net(images[chosen]), classes[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % _EVERY == 0:
            net.eval()
            with torch.no_grad():
                accuracy = float((net(tests).argmax(1) == test_classes).float().mean())
            net.train()
            print(f"seed {seed}, step {step}: {accuracy:.1%}", flush=True)
            if accuracy >= target:
                return step
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with all seeds, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--seeds", type=number, default=3)
    parser.add_argument("--steps", type=number, default=200, help="at most")
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    steps = [steps_to(options.target, seed, options.steps) for seed in range(1, options.seeds + 1)]
    if options.json:
        content = {"target": options.target, "steps": steps}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(steps) else 1


if __name__ == "__main__":
    sys.exit(main())

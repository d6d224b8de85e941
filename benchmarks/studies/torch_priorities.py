"""The PyTorch side of `priorities.py`: DDP and `ScheduledOptimizer` in turns, on an emulated network.

Real processes. A model of equal linear layers, whose computation is slept, so that a busy machine changes
little. A turn is some steps of each; what DDP begins with is what the others begin with, so that all must end
with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from netstorm.topology.files import dump_network, load_network

__all__ = ["main"]

SYSTEMS = ("ddp", "ddp, small buckets", "scheduled")
"""DDP with PyTorch's buckets of 25 MB; with one bucket a layer; `ScheduledOptimizer`."""


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all systems on an emulated network, say what was found, and return it.

    Raises:
        NetStormError: the network file is wrong.
        subprocess.CalledProcessError: the job has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "network.yaml")
        file.write_text(dump_network(load_network(options.network).scaled(options.rates_scale)))
        command = [sys.executable, "-m", "netstorm", "launch", "--wan", str(file)]
        if options.chunk:
            command += ["--env", f"CHUNK_SIZE={options.chunk}"]
        numbers = (options.size, options.layers, options.compute, options.steps, options.turns)
        command += ["--", sys.executable, __file__, *map(str, numbers), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=options.timeout)
        answers = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("rank*.json"))]
    return rows_of(answers, options.steps, options.compute)


def rows_of(answers: list[dict[str, Any]], steps: int, compute_s: float) -> list[dict[str, Any]]:
    """Return a row for each system, and print it.

    Args:
        answers: of the ranks: the seconds of each turn, by system, and the digests of their weights.
        steps: of a turn.
        compute_s: what a step computes.
    """
    digests = {digest for answer in answers for digest in answer["digests"].values()}
    rows = []
    base: list[float] = []
    for system in SYSTEMS:
        turns = [
            max(one) / steps for one in zip(*(answer["turns"][system] for answer in answers), strict=True)
        ]
        base = base or turns
        ratios = [turn / of_ddp for turn, of_ddp in zip(turns, base, strict=True)]
        rows.append(
            {
                "system": system,
                "step_s": statistics.median(turns),
                "compute_s": compute_s,
                "of_ddp": statistics.median(ratios),
                "of_ddp_by_turn": ratios,
                "same_weights": len(digests) == 1,
            }
        )
        row = rows[-1]
        print(
            f"{system}: a step takes {row['step_s']:.3f} s, {row['of_ddp']:.3f} of DDP's in the same turn "
            f"(median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    print("all end with the same bits" if len(digests) == 1 else "last bits of the weights differ")
    return rows


def train(size: int, layers: int, compute_s: float, steps: int, turns: int) -> dict[str, Any]:
    """Train all systems in turns, as one rank; return what `rows_of` takes."""
    import torch  # noqa: PLC0415 - the driver has no use for PyTorch
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("netstorm")
    rank, width = dist.get_rank(), max(1, math.isqrt(size // 4 // layers))
    systems = {system: _system(system, width, layers, compute_s) for system in SYSTEMS}

    def turn(system: str, number: int) -> float:
        model, loop = systems[system]
        dist.barrier()
        began = time.monotonic()
        for step in range(steps):
            loop.zero_grad()
            torch.manual_seed(1000 * number + 10 * step + rank)
            model(torch.randn(4, width)).pow(2).mean().backward()
            loop.step()
        getattr(loop, "synchronize", lambda: None)()
        return time.monotonic() - began

    found: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for number in range(turns + 1):
        for system in SYSTEMS if number % 2 else reversed(SYSTEMS):
            took = turn(system, number)
            if number:  # the first one warms up
                found[system].append(took)
    digests = {system: _digest(model.parameters()) for system, (model, _) in systems.items()}
    dist.barrier()
    dist.destroy_process_group()
    return {"rank": rank, "turns": found, "digests": digests}


def _system(system: str, width: int, layers: int, compute_s: float) -> tuple[Any, Any]:
    """Return a model that trains with `system`, and what has its `zero_grad` and `step`."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    from netstorm.frontends.torch.scheduled_optimizer import ScheduledOptimizer  # noqa: PLC0415

    class Computation(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, values: Any) -> Any:
            time.sleep(compute_s / 3 / layers)
            return values.clone()

        @staticmethod
        def backward(_context: Any, *gradients: Any) -> Any:
            time.sleep(compute_s * 2 / 3 / layers)
            return gradients[0]

    slowly: Any = Computation.apply

    class Layer(nn.Linear):
        def forward(self, values: Any) -> Any:
            return slowly(super().forward(values))

    torch.manual_seed(1)
    model = nn.Sequential(*(Layer(width, width, bias=False) for _ in range(layers)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if system == "scheduled":
        return model, ScheduledOptimizer(model, optimizer)
    buckets: dict[str, Any] = {} if system == "ddp" else {"bucket_cap_mb": 4 * width**2 / 2**20}
    return DistributedDataParallel(model, **buckets), optimizer


def _digest(parameters: Any) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _rank(numbers: list[str], folder: Path) -> None:
    size, layers, compute_s, steps, turns = numbers
    answer = train(int(size), int(layers), float(compute_s), int(steps), int(turns))
    (folder / f"rank{answer['rank']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    _rank(sys.argv[1:-1], Path(sys.argv[-1]))

"""Who trains in a race of PyTorch jobs: the processes of each, and what is missing for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from systems.base import BENCHMARKS, Case, Launch, Process, environment
from systems.entrants import Entrant, Entry, enter
from systems.torch_ddp import TORCH_GLOO, TORCH_NETSTORM

__all__ = ["TRAININGS", "Training", "training_launch", "why_not"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A way to train, which one name of the command line stands for."""

    entrant: str
    """Whose processes are started (`systems.entrants`)."""
    diloco: bool
    """It synchronises now and then; else in every step."""
    what: str
    """For the reader of the results."""
    network_free: bool = False
    """It takes place on loopback, whatever network the others have: what computing alone takes."""


TRAININGS: Final[Mapping[str, Training]] = {
    "ddp-gloo": Training(entrant=TORCH_GLOO, diloco=False, what="DistributedDataParallel on Gloo"),
    "ddp-netstorm": Training(
        entrant=TORCH_NETSTORM, diloco=False, what="DistributedDataParallel on NetStorm, packed trees"
    ),
    "ddp-codec": Training(
        entrant=TORCH_NETSTORM,
        diloco=False,
        what="ddp-netstorm, gradients under PowerSGD of rank 16: of the codecs that cost no loss the "
        "one that sends least",
    ),
    "diloco-torchft": Training(
        entrant=TORCH_GLOO,
        diloco=True,
        what="torchft.local_sgd.DiLoCo on torchft's Gloo, all parameters at once",
    ),
    "diloco-gloo": Training(entrant=TORCH_GLOO, diloco=True, what="NetStorm's class DiLoCo on Gloo"),
    "diloco-hivemind": Training(
        entrant="hivemind",
        diloco=True,
        what="DiLoCo's outer step on averages of hivemind's DecentralizedAverager; groups are formed untimed",
    ),
    "diloco-netstorm": Training(
        entrant=TORCH_NETSTORM, diloco=True, what="NetStorm's class DiLoCo on NetStorm, packed trees"
    ),
    "diloco-streaming": Training(
        entrant=TORCH_NETSTORM,
        diloco=True,
        what="NetStorm's class DiLoCo, a fragment for each block, whose sums overlap with five steps",
    ),
    "ddp-network-free": Training(
        entrant=TORCH_NETSTORM, diloco=False, network_free=True, what="ddp-netstorm on loopback"
    ),
    "diloco-network-free": Training(
        entrant=TORCH_NETSTORM, diloco=True, network_free=True, what="diloco-netstorm on loopback"
    ),
    "diloco-streaming-network-free": Training(
        entrant=TORCH_NETSTORM, diloco=True, network_free=True, what="diloco-streaming on loopback"
    ),
}
"""By name."""


def why_not(name: str) -> str:
    """Return what is missing for a training; empty: nothing."""
    if name == "diloco-torchft" and importlib.util.find_spec("torchft") is None:
        return "torchft not installed (pip install torchft)"
    return ""


def training_launch(name: str, case: Case, entry: Entry, arguments: list[str]) -> Launch | str:
    """Return the processes that train, or why there are none.

    Args:
        name: of a training.
        case: ranks and bytes of the model.
        entry: the network, for who must know it.
        arguments: of the worker, behind the training's name and the model's bytes.
    """
    training = TRAININGS[name]
    [entrant] = enter([training.entrant], entry)
    missing = why_not(name) or entrant.why_not
    if missing:
        return missing
    worker = str(BENCHMARKS / "workers" / "torch_train.py")
    command = [sys.executable, worker, name, str(case.nodes), str(case.bytes), *arguments]
    launch = _launch_of(entrant, case).running(command)
    launch = _with_variables(launch, lambda _rank: {"OMP_NUM_THREADS": "1"})
    return _beside_a_lighthouse(launch, case) if name == "diloco-torchft" else launch


def _launch_of(entrant: Entrant, case: Case) -> Launch:
    [system] = entrant.systems
    return system.launch(case)


def _beside_a_lighthouse(launch: Launch, case: Case) -> Launch:
    """Add torchft's lighthouse beside rank 0; each rank is a replica group of one, with its own store."""
    port = case.port()
    lighthouse = Process(
        name="torchft lighthouse",
        command=[
            *(sys.executable, str(BENCHMARKS / "workers" / "torchft_lighthouse.py")),
            *(case.host(0), str(port), str(case.nodes)),
        ],
        environment=environment(),
    )

    def variables(rank: int) -> dict[str, str]:
        return {
            "BENCHMARK_LIGHTHOUSE": f"http://{case.host(0)}:{port}",
            "BENCHMARK_PORT": str(case.port(rank)),
        }

    return replace(_with_variables(launch, variables), helpers=[*launch.helpers, lighthouse])


def _with_variables(launch: Launch, variables: Callable[[int], Mapping[str, str]]) -> Launch:
    workers = [
        replace(worker, environment={**worker.environment, **variables(worker.rank)})
        for worker in launch.workers
    ]
    return replace(launch, workers=workers)

"""What PyTorch's users run: a model in `DistributedDataParallel`, over Gloo or over NetStorm.

A round is one step of training without its optimizer: the gradients are reset, forward, backward; DDP's hooks
sum its buckets while backward goes on. The model's layers take so little computation that a step is as long
as the sum. A layer's gradient is its input, so each rank's addends are the inputs of that step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from systems.base import Case, Launch, Node, worker_command
from systems.gloo import Gloo, interface_of
from systems.netstorm_store import NetStormStore

__all__ = ["TORCH_GLOO", "TORCH_NETSTORM", "TorchDDP", "join_group", "layer_sizes"]

TORCH_GLOO: Final = "torch-gloo"
TORCH_NETSTORM: Final = "torch-netstorm"

_BACKENDS: Final = {TORCH_GLOO: "gloo", TORCH_NETSTORM: "netstorm"}

_LAYER: Final = 1_000_000
"""Elements of a layer at most, unless the case says how many arrays there are: a few big linear layers."""

_TIMEOUT: Final = timedelta(hours=1)
"""Of the process group: the driver ends what takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDDP:
    """DDP over one backend, whose processes `job` starts."""

    kind: str
    """`TORCH_GLOO` or `TORCH_NETSTORM`."""
    job: Gloo | NetStormStore
    framework: str = "torch"

    @property
    def name(self) -> str:
        """What the command line and the results call it."""
        return self.job.name

    @property
    def settings(self) -> Mapping[str, str]:
        """What it is run with."""
        own = {name: text for name, text in self.job.settings.items() if name not in ("kvstore", "algorithm")}
        return {**own, "backend": _BACKENDS[self.kind], "call": "DistributedDataParallel, its defaults"}

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group, with the variables that `torchrun` sets."""
        launch = self.job.launch(case).running(worker_command(self.kind, case))
        port = case.port()
        workers = [
            replace(
                worker,
                environment={
                    **worker.environment,
                    "MASTER_ADDR": case.host(0),
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(case.nodes),
                    "RANK": str(worker.rank),
                    "OMP_NUM_THREADS": "1",
                    "BENCHMARK_ADDRESS": case.host(worker.rank),
                },
            )
            for worker in launch.workers
        ]
        return replace(launch, workers=workers)

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return case.nodes * (300_000_000 + 7 * case.bytes)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        join_group(_BACKENDS[self.kind])
        return _DDPNode(case)


def join_group(backend: str) -> None:
    """Make PyTorch's default group of the ranks that `TorchDDP.launch` has started."""
    import torch.distributed as dist  # noqa: PLC0415 - the driver has no use for PyTorch

    if backend == "netstorm":
        import netstorm.frontends.torch  # noqa: F401, PLC0415 - registers the backend
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(os.environ["BENCHMARK_ADDRESS"])
    dist.init_process_group(backend, timeout=_TIMEOUT)


def layer_sizes(case: Case) -> list[int]:
    """Return the elements of each layer: those of the case, or few big ones where it has one array."""
    if case.model or case.keys > 1:
        return case.sizes
    layers = -(-case.bytes // 4 // _LAYER)
    return replace(case, keys=layers).sizes


class _DDPNode:
    tolerance = 1e-6
    """Of the largest value: DDP divides by the number of ranks before it sums, which float32 rounds."""

    def __init__(self, case: Case) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        self.rank = dist.get_rank()
        self.nodes = dist.get_world_size()
        self.sizes = layer_sizes(case)
        self._inputs: list[Any] = [torch.zeros(1, size) for size in self.sizes]
        self._model: Any = DistributedDataParallel(_model(self.sizes))

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of what will be this rank's gradient of layer `index`."""
        self._inputs[index][0].numpy()[start : start + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of the sum of layer `index`: its gradient, which is the mean, times the ranks."""
        mean: NDArray[np.float32] = self._model.module[index].weight.grad[0].numpy()[start:stop]
        return mean * np.float32(self.nodes)

    def settle(self) -> None:
        """Do nothing: writes are done when they return."""

    def allreduce(self) -> None:
        """Take a step without an optimizer."""
        self._model.zero_grad()
        self._model(self._inputs).backward()


def _model(sizes: list[int]) -> Any:
    """Return linear layers of one output each, side by side; the loss is the sum of their outputs."""
    import torch  # noqa: PLC0415

    class Layers(torch.nn.ModuleList):
        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            outputs = [layer(row) for layer, row in zip(self, inputs, strict=True)]
            return torch.cat(outputs).sum()

    return Layers(torch.nn.Linear(size, 1, bias=False) for size in sizes)

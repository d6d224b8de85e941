"""`all_reduce` of PyTorch's `torch.distributed`, in place: over Gloo, its CPU backend (TCP), or another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import psutil
from numpy.typing import NDArray

from systems.base import Case, Launch, Node, Process, environment, worker_command

__all__ = ["Gloo", "interface_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """A process group of PyTorch's, Gloo's or another one."""

    name: str = "gloo"
    backend: str = "gloo"
    framework: str = "torch"
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes."""
    settings: Mapping[str, str] = field(
        default_factory=lambda: {
            "backend": "gloo",
            "interface": "that of the address",
            "algorithm": "ring (its default)",
        }
    )

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        port = case.port()
        return Launch(
            workers=[
                Process(
                    name=f"{self.name} worker {rank}",
                    command=worker_command(self.name, case),
                    environment=environment(
                        **self.variables,
                        MASTER_ADDR=case.host(0),
                        MASTER_PORT=port,
                        WORLD_SIZE=case.nodes,
                        RANK=rank,
                        BENCHMARK_ADDRESS=case.host(rank),
                    ),
                    rank=rank,
                )
                for rank in range(case.nodes)
            ]
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return case.nodes * (250_000_000 + 2 * case.bytes)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        return _GroupNode(case, self.backend)


class Tensors:
    """The arrays alone, without a process group."""

    def __init__(self, case: Case) -> None:
        import torch  # noqa: PLC0415 - the driver has no use for PyTorch

        self.rank = 0
        self.nodes = 1
        self.sizes = case.sizes
        self.values = [torch.zeros(size) for size in self.sizes]

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of array `index`."""
        self.values[index].numpy()[start : start + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of array `index`."""
        values: NDArray[np.float32] = self.values[index].numpy()[start:stop]
        return values

    def settle(self) -> None:
        """Do nothing: writes are done when they return."""

    def allreduce(self) -> None:
        """Do nothing: the sum over one rank."""


class _GroupNode(Tensors):
    def __init__(self, case: Case, backend: str) -> None:
        import torch.distributed  # noqa: PLC0415

        super().__init__(case)
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(os.environ["BENCHMARK_ADDRESS"])
        self._distributed = torch.distributed
        self._distributed.init_process_group(backend)
        self.rank = self._distributed.get_rank()
        self.nodes = self._distributed.get_world_size()

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks."""
        for work in [self._distributed.all_reduce(value, async_op=True) for value in self.values]:
            work.wait()


def interface_of(address: str) -> str:
    """Return the interface that has an address: its name is known only where the worker runs."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return name
    raise RuntimeError(f"no interface here has the address {address}")

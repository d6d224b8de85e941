"""How the ranks of `torch_train.py` exchange what they have learnt: one class for each way."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpt.model import GPT
from systems.base import Case
from systems.gloo import interface_of
from systems.hivemind import Hivemind
from systems.torch_ddp import join_group

__all__ = ["EXCHANGES", "Exchange", "Setting"]

_TIMEOUT: Final = timedelta(hours=1)
"""The driver ends what takes too long."""

_CODEC: Final = {"type": "powersgd", "rank": 16}
"""It costs no loss, and sends least of those that do not (docs/benchmarks/codecs.md)."""

_DELAY: Final = 5
"""Steps that a fragment's sum may take."""


class Setting:
    """What every exchange is made of."""

    def __init__(self, case: Case, model: nn.Module, inner: Optimizer, sync_every: int) -> None:
        self.case = case
        self.model = model
        self.inner = inner
        self.sync_every = sync_every

    def outer(self) -> Optimizer:
        """Return DiLoCo's outer optimizer, with the values of its paper."""
        return torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


class Exchange(Protocol):
    """A rank's part in one way to train together."""

    model: nn.Module
    """What the loss is computed with."""
    rank: int

    def prepare(self) -> None:
        """Do what needs no time of the training, before some steps of it."""

    def after_step(self) -> None:
        """Do what a step of the inner optimizer does not do by itself."""


class _Joined:
    """A rank of PyTorch's default group."""

    def __init__(self, backend: str) -> None:
        join_group(backend)
        self.rank = dist.get_rank()

    def prepare(self) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        """Do nothing: hooks do it all."""


class DDP(_Joined):
    """Gradients are averaged in every step."""

    def __init__(self, setting: Setting, backend: str, *, codec: Any = None) -> None:
        super().__init__(backend)
        self.model: nn.Module = DistributedDataParallel(setting.model)
        if codec is not None:
            from netstorm.frontends.torch.gradient_codecs import (  # noqa: PLC0415 - only where it is used
                CodecHookState,
                codec_hook,
            )

            self.model.register_comm_hook(CodecHookState(codec, setting.model), codec_hook)


class OurDiLoCo(_Joined):
    """NetStorm's class, on any backend: the whole model at once, or streamed in fragments with a delay."""

    def __init__(self, setting: Setting, backend: str, *, streaming: bool = False) -> None:
        from netstorm.frontends.torch.local_updates import DiLoCo  # noqa: PLC0415 - only where it is used

        super().__init__(backend)
        self.model = setting.model
        fragments = [self.model]
        if streaming:
            assert isinstance(self.model, GPT)
            fragments = [self.model.embedding, *self.model.blocks, self.model.head]
        self._training = DiLoCo(
            fragments,
            setting.inner,
            setting.outer(),
            sync_every=setting.sync_every,
            fragment_sync_delay=min(_DELAY, setting.sync_every - 1) if streaming else 0,
            fragment_update_alpha=0.5 if streaming else 0.0,
        )
        self._training.__enter__()  # until the process ends


class TorchftDiLoCo:
    """torchft's class, on its own Gloo. Each rank is a replica group of one process."""

    def __init__(self, setting: Setting) -> None:
        torchft: Any = importlib.import_module("torchft")
        store: Any = dist
        self.rank = int(os.environ["RANK"])
        self.model = setting.model
        host, port = os.environ["BENCHMARK_ADDRESS"], int(os.environ["BENCHMARK_PORT"])
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(host)
        self._store = store.TCPStore(host, port, is_master=True, wait_for_workers=False)
        self._manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=setting.case.nodes,
            use_async_quorum=False,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=port,
            lighthouse_addr=os.environ["BENCHMARK_LIGHTHOUSE"],
            replica_id=f"rank_{self.rank}",
            hostname=host,
            init_sync=False,  # all ranks draw the same parameters
        )
        training = importlib.import_module("torchft.local_sgd").DiLoCo(
            self._manager,
            [self.model],
            setting.inner,
            setting.outer(),
            sync_every=setting.sync_every,
            use_bucketization=True,
        )
        training.__enter__()

    def prepare(self) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        """Do nothing: hooks do it all."""


class HivemindDiLoCo:
    """DiLoCo's outer step on averages of hivemind's averager."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.model
        self._node = Hivemind().join(setting.case)
        self.rank = self._node.rank
        self._outer = setting.outer()
        self._sync_every = setting.sync_every
        self._steps = 0
        self._global = self._flat()

    def prepare(self) -> None:
        """Have the group of the next average formed."""
        self._node.settle()

    def after_step(self) -> None:
        """Synchronise, if it is time."""
        self._steps += 1
        if self._steps % self._sync_every:
            return
        self._node.write(0, 0, (self._global - self._flat()).numpy())
        self._node.allreduce()
        mean = self._node.read(0, 0, self._global.numel()) / np.float32(self._node.nodes)
        self._load(self._global)
        gradients = torch.from_numpy(mean)
        for parameter, gradient in zip(self._parameters(), self._parts(gradients), strict=True):
            parameter.grad = gradient
        self._outer.step()
        self._global = self._flat()

    def _parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def _flat(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self._parameters()).detach().clone()

    def _load(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter, part in zip(self._parameters(), self._parts(flat), strict=True):
                parameter.copy_(part)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters()]
        parts = zip(self._parameters(), torch.split(flat, sizes), strict=True)
        return [part.view_as(parameter) for parameter, part in parts]


EXCHANGES: Final[dict[str, Callable[[Setting], Exchange]]] = {
    "ddp-gloo": lambda setting: DDP(setting, "gloo"),
    "ddp-netstorm": lambda setting: DDP(setting, "netstorm"),
    "ddp-codec": lambda setting: DDP(setting, "netstorm", codec=_CODEC),
    "diloco-torchft": TorchftDiLoCo,
    "diloco-gloo": lambda setting: OurDiLoCo(setting, "gloo"),
    "diloco-hivemind": HivemindDiLoCo,
    "diloco-netstorm": lambda setting: OurDiLoCo(setting, "netstorm"),
    "diloco-streaming": lambda setting: OurDiLoCo(setting, "netstorm", streaming=True),
    "ddp-network-free": lambda setting: DDP(setting, "netstorm"),
    "diloco-network-free": lambda setting: OurDiLoCo(setting, "netstorm"),
    "diloco-streaming-network-free": lambda setting: OurDiLoCo(setting, "netstorm", streaming=True),
}
"""By the name of a training (`systems.torch_training`)."""

"""Lets the wheel's tests of DDP, which ask for a GPU a rank, run on the CPU: what they move stays here.

Only tests that mean DDP, and not GPUs, are run so.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

_GPUS = 8


def use_the_cpu_for_gpus() -> None:
    """Change PyTorch in this process, for good."""
    asked: Any = common_distributed
    asked.TEST_CUDA = True
    asked.TEST_XPU = True  # what `skip_if_lt_x_gpu` asks where there is no CUDA
    torch.xpu.device_count = lambda: _GPUS
    torch.cuda.device_count = lambda: _GPUS
    torch.cuda.set_device = _nothing
    torch.cuda.synchronize = _nothing
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.Tensor.cuda = _same  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = _same  # type: ignore[assignment,method-assign]
    torch.Stream = _CpuStream  # type: ignore[misc]
    move, begin = torch.nn.Module.to, DistributedDataParallel.__init__

    def to(module: Any, *arguments: Any, **named: Any) -> Any:
        kept = [each for each in arguments if not _is_gpu(each)]
        named = {name: each for name, each in named.items() if not _is_gpu(each)}
        return move(module, *kept, **named) if kept or named else module

    def begin_without_devices(model: Any, module: Any, *_: Any, **named: Any) -> None:
        begin(model, module, **{**named, "device_ids": None, "output_device": None})

    torch.nn.Module.to = to  # type: ignore[assignment]
    DistributedDataParallel.__init__ = begin_without_devices  # type: ignore[assignment,method-assign]
    _ToCpu().__enter__()


class _CpuStream(torch.Stream):
    """What `torch.Stream()` is where PyTorch is built for CPUs: a build for GPUs asks for a driver."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(cls, device="cpu")


class _ToCpu(TorchFunctionMode):
    """Tensors that would be made on a GPU, or moved to one, are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {
            name: torch.device("cpu") if _is_device(name, each) else each
            for name, each in (kwargs or {}).items()
        }
        if func is torch.Tensor.to:
            args = (args[0], *(torch.device("cpu") if _is_gpu(each) else each for each in args[1:]))
        return func(*args, **kwargs)


def _is_device(name: str, value: object) -> bool:
    return name == "device" and _is_gpu(value)


def _is_gpu(value: object) -> bool:
    """Return whether an argument names a GPU; a number is one, too."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return (isinstance(value, int) and not isinstance(value, bool)) or str(value).startswith("cuda")


def _same(moved: Any, *_: Any, **__: Any) -> Any:
    return moved


def _nothing(*_: Any, **__: Any) -> None:
    pass

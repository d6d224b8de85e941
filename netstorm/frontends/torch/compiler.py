"""Keeps torch.compile out of NetStorm's own code, which hands memory to other threads and waits for them.

A compiled program calls it as it is, as it calls Gloo's C++.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

__all__ = ["methods_are_never_compiled", "never_compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

# What torch.compiler.disable does in the end. That itself would import the compiler, which takes seconds.
_frames: Final[Any] = torch._C._dynamo.eval_frame  # noqa: SLF001
_SKIP: Final = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # noqa: SLF001


def never_compiled(function: Function) -> Function:
    """Decorate a function: torch.compile traces neither it nor what it calls."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def methods_are_never_compiled(decorated: Class) -> Class:
    """Decorate a class: torch.compile traces none of its methods."""
    for member in vars(decorated).values():
        if inspect.isfunction(member):
            never_compiled(member)
    return decorated

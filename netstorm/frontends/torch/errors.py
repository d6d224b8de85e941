"""NetStorm's errors as PyTorch's users catch them: each is also a `torch.distributed.DistBackendError`.

Every class of `netstorm.errors` has a subclass here that is a `DistBackendError`, too, which is a
`RuntimeError`. So `except NodeLost`, `except NetStormError` and `except RuntimeError` all catch it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch.distributed as dist

from netstorm.errors import NetStormError

__all__ = ["as_torch_error", "raises_torch_errors"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_classes: Final[dict[type[NetStormError], type[NetStormError]]] = {}


def as_torch_error(error: BaseException) -> NetStormError:
    """Return `error` as a `DistBackendError` that is also of the error's own NetStorm class.

    An error that is not NetStorm's own comes out as a plain `NetStormError` that names its class.
    """
    if isinstance(error, NetStormError):
        if isinstance(error, dist.DistBackendError):
            return type(error)(*error.args)
        return _class_of(type(error))(str(error))
    return _class_of(NetStormError)(f"{type(error).__name__}: {error}")


def raises_torch_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function: an error of NetStorm's that leaves it is also a `DistBackendError`."""

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except NetStormError as error:
            if isinstance(error, dist.DistBackendError):
                raise
            raise as_torch_error(error).with_traceback(error.__traceback__) from error.__cause__

    return call


def _class_of(own: type[NetStormError]) -> type[NetStormError]:
    known = _classes.get(own)
    if known is None:
        known = type(
            own.__name__,
            (own, dist.DistBackendError),
            {
                "__module__": own.__module__,
                "__qualname__": own.__qualname__,
                "__doc__": own.__doc__,
                # PyTorch's checkpoints, process pools and others pickle the errors of their workers.
                "__reduce__": lambda error: (as_torch_error, (own(*error.args),)),
            },
        )
        _classes[own] = known
    return known

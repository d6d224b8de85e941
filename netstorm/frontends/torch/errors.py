"""NetStorm's errors as PyTorch's users catch them: each is also a `torch.distributed.DistBackendError`.

Every class of `netstorm.errors` has a subclass here that is a `DistBackendError`, too, which is a
`RuntimeError`. So `except NodeLost`, `except NetStormError` and `except RuntimeError` all catch it.

PyTorch's futures turn what a continuation raises into a `RuntimeError` whose text has the error and a stack.
DDP waits for such futures inside `backward`, which therefore finds out which error it was.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch.distributed as dist

from netstorm.errors import NetStormError
from netstorm.frontends.torch.internals import replace_backward

__all__ = ["as_torch_error", "given_to_a_future", "let_backward_raise_own_errors", "raises_torch_errors"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_classes: Final[dict[type[NetStormError], type[NetStormError]]] = {}

_given: Final[deque[NetStormError]] = deque(maxlen=16)
"""The newest errors that futures have been given."""


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


def given_to_a_future(error: NetStormError) -> NetStormError:
    """Return `error`, and know it again if `backward` raises what a future has made of it."""
    _given.append(error)
    return error


def let_backward_raise_own_errors() -> None:
    """Have `Tensor.backward` and `torch.autograd.grad` raise NetStorm's errors, where a `RuntimeError` of
    PyTorch's quotes one. Twice does no harm.
    """

    def raising(original: Callable[..., Any]) -> Callable[..., Any] | None:
        if hasattr(original, "of_netstorm"):
            return None

        @functools.wraps(original)
        def run_backward(*arguments: Any, **named: Any) -> Any:
            try:
                return original(*arguments, **named)
            except RuntimeError as error:
                text = str(error)
                own = next((known for known in _given if f"{type(known).__name__}: {known}" in text), None)
                if own is None or isinstance(error, NetStormError):
                    raise
            raise as_torch_error(own)

        run_backward.of_netstorm = True  # type: ignore[attr-defined]
        return run_backward

    replace_backward(raising)


def _class_of(own: type[NetStormError]) -> type[NetStormError]:
    made = _classes.get(own)
    if made is None:
        made = type(
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
        _classes[own] = made
    return made

"""NetStorm's errors as MXNet's users catch them: each is also an `mx.MXNetError`.

Every class of `netstorm.errors` has a subclass here that is an `MXNetError`, too, so `except UsageError`,
`except NetStormError` and `except mx.MXNetError` all catch it. `netstorm.errors` itself cannot do this: it
must not import MXNet. Two decorators convert what a store raises in a call; `engine` converts
what an operation raises later, in `asnumpy()` or `wait_to_read()`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.compat import mx

__all__ = [
    "as_mxnet_error",
    "error_text",
    "methods_raise_mxnet_errors",
    "mxnet_error_class",
    "raises_mxnet_errors",
    "registered_name",
]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Store = TypeVar("Store", bound=type)

_MXNetError: Final[type[Exception]] = mx.base.MXNetError

_classes: Final[dict[type[NetStormError], type[NetStormError]]] = {}


def methods_raise_mxnet_errors(store: Store) -> Store:
    """Decorate a KVStore class: its public methods, and those of MXNet's interface, raise `MXNetError`s.

    Helpers, whose names begin with "_" and which MXNet does not call, raise what they raise.
    """
    for name, member in list(vars(store).items()):
        if name.startswith("_") and not hasattr(mx.kvstore.KVStore, name):
            continue
        if inspect.isfunction(member):
            setattr(store, name, raises_mxnet_errors(member))
        elif isinstance(member, staticmethod):
            setattr(store, name, staticmethod(raises_mxnet_errors(member.__func__)))
    return store


def raises_mxnet_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function: an error of NetStorm's that leaves it is also an `MXNetError`."""

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except NetStormError as error:
            if isinstance(error, _MXNetError):
                raise
            # As if it had been raised with this class: its traceback and its cause, and no second traceback.
            raise as_mxnet_error(error).with_traceback(error.__traceback__) from error.__cause__

    return call


def as_mxnet_error(error: BaseException) -> NetStormError:
    """Return `error` as an MXNetError that is also of the error's own NetStorm class.

    An error that is not NetStorm's own comes out as a plain `NetStormError` that names its class.
    """
    return mxnet_error_class(error)(error_text(error))


def error_text(error: BaseException) -> str:
    """Return the message of `as_mxnet_error(error)`."""
    return str(error) if isinstance(error, NetStormError) else f"{type(error).__name__}: {error}"


def mxnet_error_class(error: BaseException) -> type[NetStormError]:
    """Return the class of `as_mxnet_error(error)`, which MXNet knows by its `registered_name`."""
    own = type(error) if isinstance(error, NetStormError) else NetStormError
    if issubclass(own, _MXNetError):
        return own  # it has been converted before
    known = _classes.get(own)
    return known if known is not None else _make_class(own)


def registered_name(error_class: type[NetStormError]) -> str:
    """Return what MXNet knows a class by: letters, digits, "_" and "." are allowed."""
    return f"{error_class.__module__}.{error_class.__name__}"


def _make_class(own: type[NetStormError]) -> type[NetStormError]:
    name = registered_name(own)

    def initialise(self: NetStormError, message: str = "") -> None:
        # From the engine the message comes with the name that chose the class, which a traceback prints
        # anyway.
        super(both, self).__init__(message.removeprefix(f"{name}: "))

    both: type[NetStormError] = type(
        own.__name__,
        (own, _MXNetError),
        {
            "__init__": initialise,
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        },
    )
    mx.base.register_error(name, both)
    return _classes.setdefault(own, both)

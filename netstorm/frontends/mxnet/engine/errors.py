"""Errors across MXNet's engine: into it as C++ exceptions, out of it as Python classes that both sides know.

An operation fails by handing the engine a `const dmlc::Error*`, which the engine copies. `dmlc::Error` is a
`std::runtime_error` without members of its own (dmlc/logging.h), so one of those, constructed in our memory
by the C++ library that libmxnet itself uses, will do. All that survives is its text. MXNet picks the Python
class by what stands before the first colon (`mxnet.base.register_error`), so the class's full name goes
there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.compat import mx

__all__ = ["as_mxnet_error", "native_error"]

_MXNetError: Final[type[Exception]] = mx.base.MXNetError

# dlsym on libmxnet's handle also searches what libmxnet was linked with. So these are the functions of the
# very C++ library (libstdc++, or libc++ on macOS) that will copy and destroy the object; both use these
# names.
_construct: Final = mx.base._LIB["_ZNSt13runtime_errorC1EPKc"]  # noqa: SLF001 -- the only handle there is
_construct.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_construct.restype = None
_destruct: Final = mx.base._LIB["_ZNSt13runtime_errorD1Ev"]  # noqa: SLF001
_destruct.argtypes = [ctypes.c_void_p]
_destruct.restype = None

# A vtable pointer and a reference-counted string: two words in libstdc++ and libc++; the rest is room to
# spare.
_RuntimeError = ctypes.c_void_p * 8

_classes: Final[dict[type[NetStormError], type[NetStormError]]] = {}


def as_mxnet_error(error: BaseException) -> NetStormError:
    """Return `error` as the engine raises it: an MXNetError that is also of the error's own NetStorm class.

    An error that is not NetStorm's own comes out as a plain `NetStormError` that names its class.
    """
    return _class_for(error)(_text(error))


@contextmanager
def native_error(error: BaseException) -> Iterator[int]:
    """Yield the address of a C++ exception that says what `error` says; it lives as long as the block.

    That is long enough: the engine copies the exception before `on_complete` returns, and copies share the
    text by reference count.
    """
    # C strings end at NUL, and the message's first line must not hide the class behind it.
    text = f"{_registered_name(_class_for(error))}: {_text(error)}".replace("\0", "\\0")
    memory = _RuntimeError()
    address = ctypes.addressof(memory)
    _construct(address, text.encode("utf-8", "replace"))
    try:
        yield address
    finally:
        _destruct(address)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, NetStormError) else f"{type(error).__name__}: {error}"


def _class_for(error: BaseException) -> type[NetStormError]:
    own = type(error) if isinstance(error, NetStormError) else NetStormError
    if issubclass(own, _MXNetError):
        return own  # has been through the engine before
    known = _classes.get(own)
    return known if known is not None else _make_class(own)


def _make_class(own: type[NetStormError]) -> type[NetStormError]:
    name = _registered_name(own)

    def initialise(self: Any, message: str = "") -> None:
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


def _registered_name(error_class: type[NetStormError]) -> str:
    return f"{error_class.__module__}.{error_class.__name__}"  # an MXNet error name: letters, digits, _ and .

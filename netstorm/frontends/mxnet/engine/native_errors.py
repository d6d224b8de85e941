"""Errors as MXNet's engine takes them from an operation: C++ exceptions.

An operation fails by giving the engine a `const dmlc::Error*`, which the engine copies. `dmlc::Error` is a
`std::runtime_error` without members of its own (dmlc/logging.h). So one of those is enough, if it is
constructed in our memory by the C++ library that libmxnet itself uses. Only its text survives. MXNet picks
the Python class by what stands before the first colon (`mxnet.base.register_error`), so the class's full name
goes there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from netstorm.frontends.mxnet.engine.library import LIBRARY
from netstorm.frontends.mxnet.errors import error_text, mxnet_error_class, registered_name

__all__ = ["native_error"]

# dlsym on libmxnet's handle also searches what libmxnet was linked with. So these are the functions of the
# very C++ library (libstdc++, or libc++ on macOS) that will copy and destroy the object; both use these
# names.
_construct: Final = LIBRARY["_ZNSt13runtime_errorC1EPKc"]
_construct.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_construct.restype = None
_destruct: Final = LIBRARY["_ZNSt13runtime_errorD1Ev"]
_destruct.argtypes = [ctypes.c_void_p]
_destruct.restype = None

# A vtable pointer and a reference-counted string: two words in libstdc++ and libc++. The rest is spare.
_RuntimeError = ctypes.c_void_p * 8


@contextmanager
def native_error(error: BaseException) -> Iterator[int]:
    """Yield the address of a C++ exception with the text of `error`; it lives as long as the block.

    That is long enough: the engine copies the exception before `on_complete` returns, and copies share the
    text by reference count.
    """
    # C strings end at NUL, and the message's first line must not hide the class behind it.
    text = f"{registered_name(mxnet_error_class(error))}: {error_text(error)}".replace("\0", "\\0")
    memory = _RuntimeError()
    address = ctypes.addressof(memory)
    _construct(address, text.encode("utf-8", "replace"))
    try:
        yield address
    finally:
        _destruct(address)

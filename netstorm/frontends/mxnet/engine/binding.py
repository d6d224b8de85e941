"""The C structures and the C function by which operations reach MXNet's dependency engine."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.library import LIBRARY_KEEPING_LOCK, check_call
from netstorm.frontends.mxnet.engine.native_errors import native_error

if TYPE_CHECKING:
    from ctypes import _CFunctionType

__all__ = ["EngineCallback", "NDArray", "Operands", "ReleaseFunction", "RunFunction", "push", "variable_of"]

NDArray: TypeAlias = mx.nd.NDArray

RunFunction: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
"""`EngineAsyncFunc(run_context, on_complete, func_param)`, mxnet/c_api.h."""

ReleaseFunction: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""`EngineFuncParamDeleter(func_param)`: called when the engine destroys the operation."""

# The two calls into the engine keep Python's lock. They take microseconds and never wait (the engine holds
# none of its locks when it calls us). If they gave the lock up, the script would wait behind every engine
# thread that wants it: the slowest push of 200 took 0.5 to 3 ms, against 0.12 ms. Under NaiveEngine `start`
# runs, and waits, in this very thread.
_OnCompleteFunction: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_push: Final = LIBRARY_KEEPING_LOCK["MXEnginePushAsyncND"]
_push.restype = ctypes.c_int
_push.argtypes = [
    RunFunction,
    ctypes.c_void_p,
    ReleaseFunction,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_bool,
]


class _Context(ctypes.Structure):
    """`mxnet::Context`: where the operation runs, not where its arrays are."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _CallbackOnComplete(ctypes.Structure):
    """`mxnet::engine::CallbackOnComplete`, mxnet/engine.h."""

    _fields_ = (("function", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("operation", ctypes.c_void_p))


_CPU: Final = _Context(1, 0)
_NORMAL: Final = ctypes.c_int(0)  # mxnet::FnProperty, mxnet/engine.h: kNormal, which operators have
_CPU_PRIORITIZED: Final = ctypes.c_int(3)
_CPU_AT: Final = ctypes.addressof(_CPU)
_NORMAL_AT: Final = ctypes.byref(_NORMAL)
_CPU_PRIORITIZED_AT: Final = ctypes.byref(_CPU_PRIORITIZED)
_names: Final[dict[str, bytes]] = {}  # the engine keeps the pointer, and the profiler reads it much later

# One error at a time goes into the engine's list of errors, which has no lock of its own. Reentrant, since a
# signal handler or a destructor may fail operations in a thread that is doing so already.
_failing: Final = threading.RLock()


class EngineCallback(NamedTuple):
    """What ends one operation: a function of the engine and its two arguments."""

    function: int
    engine: int
    operation: int

    @classmethod
    def at(cls, address: int) -> EngineCallback:
        """Return a copy of the structure at `address`, which is on the stack of our caller."""
        fields = _CallbackOnComplete.from_address(address)
        return cls(fields.function, fields.engine, fields.operation)

    def __call__(self, error: BaseException | None) -> None:
        """End the operation; exactly once, from any thread."""
        on_complete = _OnCompleteFunction(self.function)
        if error is None:
            on_complete(self.engine, self.operation, None)
        else:
            with native_error(error) as address, _failing:
                on_complete(self.engine, self.operation, address)


class Operands:
    """The arrays that an operation reads and writes, as the engine takes them.

    Making one takes several us. Keep it if there will be more operations on the same arrays.
    """

    __slots__ = ("_arrays", "reads", "reads_count", "writes", "writes_count")

    def __init__(self, reads: Iterable[NDArray], writes: Iterable[NDArray]) -> None:
        """List each variable once; writing wins. An operation that has a variable twice waits for itself for
        ever.

        Raises:
            UsageError: something is no NDArray, or one without memory.
        """
        written = {variable_of(array): array for array in writes}
        read = {variable: array for array in reads if (variable := variable_of(array)) not in written}
        self._arrays: Final = (*read.values(), *written.values())  # they must live as long as their handles
        self.reads: Final = _handles(read.values())
        self.reads_count: Final = len(read)
        self.writes: Final = _handles(written.values())
        self.writes_count: Final = len(written)


def push(
    run: _CFunctionType,
    release: _CFunctionType,
    token: int,
    operands: Operands,
    *,
    priority: int,
    name: str,
    among_operators: bool = False,
) -> None:
    """Give the engine an operation.

    It will call `run` (a `RunFunction`) with `token` at most once, and `release` (a `ReleaseFunction`) once
    after.
    """
    check_call(
        _push(
            run,
            token,
            release,
            _CPU_AT,
            operands.reads,
            operands.reads_count,
            operands.writes,
            operands.writes_count,
            _NORMAL_AT if among_operators else _CPU_PRIORITIZED_AT,
            priority,
            _names.setdefault(name, name.encode()),
            False,
        )
    )


def variable_of(array: NDArray) -> int:
    """Return an address that identifies the engine variable of `array`; its views share it.

    The C API does not give the variable. But the first member of `mxnet::NDArray` is the pointer to the chunk
    that owns memory and variable (mxnet/ndarray.h). `_check_layout` makes sure of it.

    Raises:
        UsageError: it is no NDArray, or one without memory.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise UsageError(f"MXNet's engine works on NDArrays, not on {type(array).__name__} ({array!r:.60})")
    assert array.handle.value is not None
    chunk = ctypes.c_void_p.from_address(array.handle.value).value
    if chunk is None:
        raise UsageError("an NDArray without shape and memory can be neither read nor written")
    return chunk


def _handles(arrays: Collection[NDArray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def _check_layout() -> None:
    whole, other = mx.nd.empty((2, 2)), mx.nd.empty((2, 2))
    chunk = variable_of(whole)
    views = (whole[1:], whole.reshape((4,)), whole.detach(), whole.as_np_ndarray())
    if any(variable_of(view) != chunk for view in views) or variable_of(other) == chunk:
        raise UsageError(
            f"this build of MXNet {mx.__version__} does not lay out NDArrays as the 1.9.1 wheels do; "
            "pip install --force-reinstall mxnet==1.9.1"
        )


_check_layout()

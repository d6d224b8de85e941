"""A device for tests that does nothing until it must: what nobody has waited for, or ordered, gives wrong
values, in each run alike.

It is PyTorch's device for back ends of others (PrivateUse1), written in Python. Its memory is the CPU's. A
stream keeps what it is told. It does it when a program synchronises with one of its events, or when a stream
that does something waits for one. Memory that is freed goes to the next tensor of its size at once, or after
the streams that have been recorded for it, as in CUDA's caching allocator. Pinned memory begins with NaN.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import backend_registration

from netstorm.frontends.torch import tensors

NAME = "lazy"

_lock = threading.RLock()


class Event:
    """A place in a stream."""

    def __init__(self, stream: LazyStream) -> None:
        self._stream = stream
        self._place = stream.queued

    def synchronize(self) -> None:
        """Have all be done that comes before."""
        self._stream.run(self._place)


class LazyStream:
    """What a device is to do, in order."""

    def __init__(self, device: object = None) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._done = 0

    @property
    def queued(self) -> int:
        """How much the stream has been told."""
        with _lock:
            return self._done + len(self._waiting)

    def add(self, work: Callable[[], object]) -> None:
        """Have something done after all that was added before."""
        with _lock:
            self._waiting.append(work)

    def record_event(self) -> Event:
        """Return this place in the stream."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """Do what is added from now on after an event."""
        self.add(event.synchronize)

    def wait_stream(self, other: LazyStream) -> None:
        """Do what is added from now on after what another stream has been told so far."""
        self.wait_event(other.record_event())

    def run(self, place: int) -> None:
        """Do all up to a place."""
        with _lock:
            while self._done < place:
                self._done += 1
                self._waiting.pop(0)()

    def synchronize(self) -> None:
        """Do all."""
        self.run(self.queued)


class Lazy:
    """What is `torch.lazy`."""

    Stream = LazyStream

    def __init__(self) -> None:
        self._default = LazyStream()
        self._current = threading.local()
        self.freed = 0
        """How many tensors' memory has been freed, or will be."""
        self.free: list[torch.Tensor] = []

    def is_initialized(self) -> bool:
        """Return whether the device can be used."""
        return True

    is_available = is_initialized

    def device_count(self) -> int:
        """Return how many of them there are."""
        return 1

    def current_device(self) -> int:
        """Return which one is used."""
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: there is no generator."""

    def current_stream(self, device: object = None) -> LazyStream:
        """Return the calling thread's stream."""
        stream: LazyStream = getattr(self._current, "stream", self._default)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        """Make a stream the calling thread's."""
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before


lazy = Lazy()


class _Memory:
    """Some memory of the device."""

    def __init__(self, values: torch.Tensor) -> None:
        with _lock:
            reused = next((free for free in lazy.free if free.shape == values.shape), None)
            if reused is not None:
                lazy.free = [free for free in lazy.free if free is not reused]
        self.values = values.clone() if reused is None else reused
        self.streams: list[LazyStream] = []
        weakref.finalize(self, _freed, self.values, self.streams).atexit = False
        lazy.current_stream().add(functools.partial(self.values.copy_, values))


def _freed(values: torch.Tensor, streams: list[LazyStream]) -> None:
    def give_back() -> None:
        lazy.free.append(values)

    with _lock:
        lazy.freed += 1
        if streams:
            streams[0].add(give_back)
        else:
            give_back()


class LazyTensor(torch.Tensor):
    """A tensor of the device."""

    memory: _Memory

    @classmethod
    def of(cls, memory: _Memory) -> LazyTensor:
        """Return a tensor with some memory."""
        tensor: Any = torch._C._acc.create_empty_tensor(tuple(memory.values.shape), memory.values.dtype)
        tensor.__class__ = cls
        tensor.memory = memory
        made: LazyTensor = tensor
        return made

    def record_stream(self, stream: Any) -> None:
        """Keep the memory, once it is freed, until a stream has done what it will have been told by then."""
        self.memory.streams.append(stream)

    def change(self, kernel: Callable[[torch.Tensor], object]) -> None:
        """Have the values changed, in the calling thread's stream."""
        values = self.memory.values
        lazy.current_stream().add(lambda: kernel(values))

    def read(self) -> list[float]:
        """Return the values as what the calling thread's stream does next would see them."""
        lazy.current_stream().synchronize()
        found: list[float] = self.memory.values.tolist()
        return found


def on_device(values: list[float]) -> LazyTensor:
    """Return a tensor of the device, in memory of one that was freed if there is such."""
    return LazyTensor.of(_Memory(torch.tensor(values)))


def use_the_lazy_device() -> None:
    """Make the device known to PyTorch, and to NetStorm as a GPU, in this process for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, lazy)
    library = torch.library.Library("aten", "IMPL")
    library.impl("detach", lambda tensor: LazyTensor.of(tensor.memory), "PrivateUse1")
    library.impl("_copy_from", _copy, "PrivateUse1")
    lazy.library = library  # type: ignore[attr-defined]
    tensors.GPUS.add(NAME)
    tensors.pinned_like = lambda tensor: torch.full(tensor.shape, torch.nan)


def _copy(source: torch.Tensor, target: torch.Tensor, *non_blocking: bool) -> torch.Tensor:
    taken, given = (each.memory.values if isinstance(each, LazyTensor) else each for each in (source, target))
    stream = lazy.current_stream()
    stream.add(lambda: given.copy_(taken))
    if not any(non_blocking):
        stream.synchronize()
    return target

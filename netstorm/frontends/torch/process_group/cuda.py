"""Tensors of a GPU: their values travel through pinned memory, on a stream of their own.

The copy to the host waits for the kernels that the program's current stream has queued, and for nothing that
it queues afterwards. So backward goes on while a gradient is copied. The copy back is ordered by an event
before what the program queues after `wait`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from netstorm.frontends.torch.process_group.memory import Staged

__all__ = ["StagedOnGpu", "stream_of"]

_streams: Final[dict[torch.device, Any]] = {}


def stream_of(device: torch.device) -> Any:
    """Return the stream on which values are copied from and to a GPU."""
    found = _streams.get(device)
    if found is None:
        make: Any = torch.cuda.Stream  # PyTorch has no type for it
        found = _streams[device] = make(device)
    return found


class StagedOnGpu(Staged):
    """A GPU's tensor, and its values in pinned memory."""

    must_wait = True

    def __init__(self, tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> None:
        """Begin to copy a tensor to the host; see `Staged`."""
        self._write = write
        self.tensor = tensor.detach()
        self.device = tensor.device
        self._stream: Final = stream_of(tensor.device)
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        if read:
            with torch.cuda.stream(self._stream):
                self.host.copy_(self.tensor, non_blocking=True)
        # The allocator must not give the tensor's memory to anybody else before the copies are done.
        self.tensor.record_stream(self._stream)
        self._event = self._stream.record_event()

    def wait_until_read(self) -> None:
        """Wait until the values are in `host`."""
        self._event.synchronize()

    def copy_back(self) -> None:
        """Begin to give the result to the user's tensor."""
        with torch.cuda.stream(self._stream):
            self.tensor.copy_(self.host, non_blocking=True)
        self._event = self._stream.record_event()

    def order_current_stream(self) -> None:
        """Let the current stream of the tensor's device wait for the result."""
        torch.cuda.current_stream(self.device).wait_event(self._event)

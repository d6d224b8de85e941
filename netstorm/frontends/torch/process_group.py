"""The process group: what `torch.distributed` calls, in Python and from C++."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Backend, Store
from torch.distributed import ProcessGroup, get_process_group_ranks

from netstorm.frontends.torch.compiler import methods_are_never_compiled
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.process_group.copies import Copies
from netstorm.frontends.torch.process_group.exchanges import Exchanges
from netstorm.frontends.torch.process_group.member import Member
from netstorm.frontends.torch.process_group.messages import Messages
from netstorm.frontends.torch.process_group.monitored_barrier import MonitoredBarriers
from netstorm.frontends.torch.process_group.reductions import Reductions
from netstorm.frontends.torch.process_group.sparse import SparseSums

__all__ = ["NetStormProcessGroup"]


_ProcessGroup: Final[Any] = ProcessGroup
"""Without PyTorch's types: those of its binding do not fit what it takes from Python."""


@methods_are_never_compiled
class NetStormProcessGroup(Reductions, Copies, Messages, _ProcessGroup):
    """One group, at one member. PyTorch makes it (`startup`); programs use `torch.distributed`."""

    # What PyTorch asks a backend, and finds here, since this group is its own backend (`_get_backend`).
    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, member: Member, closed: Callable[[], None], store: Store) -> None:
        """Begin.

        Args:
            member: this process in the group.
            closed: called when the group is destroyed.
            store: PyTorch's, of this group.
        """
        super().__init__(member.rank, member.size)
        self._member = member
        self._exchanges = Exchanges(member.rank, member.size)
        self._sparse = SparseSums(member, self._exchanges)
        self._monitored_barriers: Final = MonitoredBarriers(member)
        self._closed: Final = closed
        self._store: Final = store
        self._is_closed = False
        self._name = member.name
        self._description = "undefined"

    @property
    def member(self) -> Member:
        """This process in the group."""
        return self._member

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come; rank 0's error names those that have not."""
        self._check_open()
        limit = self._member.timeout if timeout is None else timeout
        raises_torch_errors(self._monitored_barriers.wait)(limit, wait_all_ranks=wait_all_ranks)

    # ---------------------------------------------------------------------------------- what PyTorch asks

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._member.rank

    def size(self) -> int:
        """Return how many members the group has."""
        return self._member.size

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def getBackendName(self) -> str:  # noqa: N802 -- PyTorch's name
        """Return the backend's name, to C++."""
        return NAME

    @property
    def group_name(self) -> str:
        """The group's name: the same at every member."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the program calls the group."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name, to C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the program calls the group, to C++."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors may be. The CPU is first: PyTorch then sends objects and states from there."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> NetStormProcessGroup:
        """Return what carries out the calls of a device's tensors.

        Raises:
            RuntimeError: nothing does, in the words that PyTorch has for it.
        """
        kind = torch.device(device).type
        if kind not in {each.type for each in self._device_types}:
            raise RuntimeError(f"No backend type associated with device type {kind}: {NAME} has none for it")
        return self

    @property
    def options(self) -> Any:
        """The group's time-out and ranks, as PyTorch's backends have them."""
        options: Any = Backend.Options(NAME, self._member.timeout)
        options.global_ranks_in_group = get_process_group_ranks(self)
        options.group_name = self._name
        return options

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """Return whether this group has memory of its own for tensors."""
        return False

    def get_group_store(self) -> Store:
        """Return PyTorch's store of this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later calls."""
        self._member.timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collective calls the program has made."""
        return self._member.called

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all members count from 0."""

    # ------------------------------------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Destroy the group. Twice does no harm."""
        if not self._is_closed:
            self._is_closed = True
            self._sparse.close()
            self._closed()

    def abort(self) -> None:
        """Destroy the group, and fail the job: other ranks may wait for calls that will not come."""
        if not self._is_closed:
            self._member.runtime.fail(f"process group {self._name!r} was aborted")
        self.shutdown()

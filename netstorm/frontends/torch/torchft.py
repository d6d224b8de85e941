"""NetStorm under torchft's Manager: `ProcessGroupNetStorm` in place of `ProcessGroupGloo`.

torchft decides who is in (its quorum), and tells each member a place in a store for every quorum. Members
find each other's handles there, and enter a view of their own (`reconfigure`), with any release of PyTorch.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroupWrapper, create_store_client

from netstorm.frontends.torch.errors import let_backward_raise_own_errors
from netstorm.frontends.torch.reconfigure import ReconfigurableGroup

__all__ = ["ProcessGroupNetStorm"]

_Wrapper: Any = ProcessGroupWrapper
"""Without torchft's types: it may be absent where types are checked."""


class ProcessGroupNetStorm(_Wrapper):
    """The process group of a `torchft.Manager`: `Manager(pg=ProcessGroupNetStorm(), ...)`."""

    _pg: ReconfigurableGroup | None
    _timeout: timedelta

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        """Do nothing before torchft's first quorum.

        Args:
            timeout: of calls, and of the wait for the members of a quorum.
        """
        super().__init__(timeout=timeout)

    def configure(  # noqa: PLR0917 -- torchft's
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Enter the view of a quorum; torchft calls it.

        Args:
            store_addr: HOST:PORT/PREFIX of a store, for this quorum alone.
            replica_id, quorum_id, group_rank, group_world_size, global_ranks: not needed.
            rank: of this process in the quorum.
            world_size: how many members it has.

        Raises:
            NetStormError: not every member has come; names them.
        """
        store = create_store_client(store_addr, timeout=self._timeout)
        if self._pg is None:
            let_backward_raise_own_errors()
            self._pg = ReconfigurableGroup(store, rank, world_size, "torchft", self._timeout)
        group = self._pg
        keys = [f"netstorm/{each}" for each in range(world_size)]
        store.set(keys[rank], group.get_reconfigure_handle())
        handles = [store.get(key).decode() for key in keys]
        number = hashlib.blake2b(store_addr.encode(), digest_size=7).digest()
        group.enter(int.from_bytes(number, "big"), handles, self._timeout)

    def errored(self) -> Exception | None:
        """Return why calls fail until the next quorum; None: they do not."""
        return None if self._pg is None else self._pg.failure

    def abort(self, errored: bool = True) -> None:
        """Fail the calls under way. The next quorum has a view of its own."""
        if self._pg is not None:
            self._pg.abort()

    def shutdown(self) -> None:
        """Leave for good. Twice does no harm."""
        if self._pg is not None:
            self._pg.shutdown()
            self._pg = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later calls and quorums."""
        self._timeout = timeout
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:  # noqa: N802 -- PyTorch's name
        """Return the name that torchft registers."""
        return "torchft-netstorm"

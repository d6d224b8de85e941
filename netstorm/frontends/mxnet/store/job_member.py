"""The part of a store that has no keys: ranks, barriers, statistics, and the end of the process."""

from __future__ import annotations

import ctypes
from typing import Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.library import LIBRARY, check_call
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.profiling import profile_here
from netstorm.frontends.mxnet.store.server_commands import dead_nodes, handle_server_command
from netstorm.kvstore.process.runtime import Runtime, after_close, before_finish, runtime_of_this_process

__all__ = ["JobMember"]

_ERRORS_AT_EXIT: Final = 100
"""Most independent errors of MXNet operations that are cleared at exit; each `waitall` raises one."""


@methods_raise_mxnet_errors
class JobMember(mx.kvstore.KVStore):
    """A KVStore as one of the nodes of a job.

    It is a subclass of MXNet's own because `gluon.Trainer` insists on one for sparse gradients.
    """

    def __init__(self) -> None:
        """Join the job, if this process has not yet; waits until all nodes are here.

        Raises:
            netstorm.errors.NetStormError: the job does not come together; the message says why and who is
                missing.
        """
        handle = mx.base.KVStoreHandle()  # MXNet's profiler and destructor need a real one
        check_call(LIBRARY.MXKVStoreCreate(b"local", ctypes.byref(handle)))
        super().__init__(handle)
        self._runtime: Final[Runtime] = runtime_of_this_process(framework="MXNet")
        profile_here(self.rank)

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._runtime.rank

    @property
    def num_workers(self) -> int:
        """With how many nodes the job begins (DMLC_NUM_WORKER).

        It never changes, since scripts divide by it, and Gluon's Trainer takes another divisor for another
        batch size. In an elastic job sums are scaled to it (NETSTORM_RESCALE);
        `live_ranks` says who is in.
        """
        return self._runtime.settings.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can run the optimizer: it can.

        Raises:
            UsageError: another capability; a ValueError, as MXNet's own error is.
        """
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return True
        raise UsageError(f"Unknown capability: {capability}")

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far: bytes, seconds on the network, counters (see `Runtime`)."""
        return self._runtime.statistics()

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """Return how many nodes of a group are dead.

        Groups have ps-lite's numbers: 1 is the scheduler, 2 and 4 are nodes, 7 is all. PS_HEARTBEAT_TIMEOUT
        says when a node counts as dead; `timeout` is ignored. MXNet has this in its C++ interface only.
        """
        return dead_nodes(self._runtime, node_id)

    def _barrier(self) -> None:
        """Wait until all ranks are here."""
        self._runtime.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        handle_server_command(head, body)


def _clear_errors() -> None:
    """Clear the errors that MXNet would raise, with a traceback, in its own exit function.

    They have been reported.
    """
    for _ in range(_ERRORS_AT_EXIT):
        try:
            mx.nd.waitall()
        except mx.base.MXNetError:
            continue
        return


before_finish(mx.nd.waitall)
after_close(_clear_errors)

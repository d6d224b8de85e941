"""What scripts tell or ask MXNet's servers, beside keys and values, on nodes that have none."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NodeLost, SchedulerLost, UsageError
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["dead_nodes", "obey"]

_log = logging.getLogger(__name__)

# mxnet.kvstore.kvstore._get_kvstore_server_command_type
_CONTROLLER: Final = 0
_NOTHING_TO_DO: Final = {1: "kSetMultiPrecision", 2: "kStopServer", 3: "kSyncMode"}
_METHODS: Final = {4: "set_gradient_compression(…)", 5: 'mx.profiler.set_config(…, profile_process="server")'}

_SCHEDULER_GROUP: Final = 1
_NODE_GROUPS: Final = 6
"""ps-lite's groups of servers (2) and workers (4): every node is both."""


def obey(head: int, body: str) -> None:
    """Take a command for servers: those that mean nothing here are accepted, as servers accept them.

    Raises:
        UsageError: a command that has a method, which must be called on every rank; says which.
    """
    if head == _CONTROLLER:
        raise UsageError(
            "a pickled optimizer is not sent anywhere: call set_optimizer on every rank, and each has its own"
        )
    if head in _METHODS:
        raise UsageError(f"command {head}: there are no servers; call {_METHODS[head]} on every rank")
    if head not in _NOTHING_TO_DO:
        _log.warning("unknown command for servers (%d, %.50s): there are none, nothing is done", head, body)


def dead_nodes(runtime: Runtime, node_id: int) -> int:
    """Return how many nodes of a group are known to be dead.

    Args:
        runtime: of this process.
        node_id: ps-lite's numbers of groups: 1 the scheduler, 2 servers, 4 workers, or a sum of these.

    Raises:
        UsageError: the number of a single node; ours have ranks.
    """
    if not 0 < node_id <= _SCHEDULER_GROUP + _NODE_GROUPS:
        raise UsageError(
            f"get_num_dead_node({node_id}): 1 is the scheduler, 2 are servers and 4 workers (every node is "
            "both), 7 are all"
        )
    failure = runtime.failure
    nodes = bool(node_id & _NODE_GROUPS) and isinstance(failure, NodeLost)
    return int(nodes or (bool(node_id & _SCHEDULER_GROUP) and isinstance(failure, SchedulerLost)))

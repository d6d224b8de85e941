"""Commands and questions for MXNet's servers, in a job that has no servers."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NodeLost, SchedulerLost, UsageError
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["dead_nodes", "handle_server_command"]

_log = logging.getLogger(__name__)

# mxnet.kvstore.kvstore._get_kvstore_server_command_type
_CONTROLLER: Final = 0
_NOTHING_TO_DO: Final = {1: "kSetMultiPrecision", 2: "kStopServer", 3: "kSyncMode"}
_METHODS: Final = {4: "set_gradient_compression(…)", 5: 'mx.profiler.set_config(…, profile_process="server")'}

_SCHEDULER_GROUP: Final = 1
_NODE_GROUPS: Final = 6
"""ps-lite's groups of servers (2) and workers (4). Every node is in both."""


def handle_server_command(head: int, body: str) -> None:
    """Accept a command for servers, if there is nothing to do for it here.

    Raises:
        UsageError: a method does what the command asks for; the message says which to call on every rank.
    """
    if head == _CONTROLLER:
        raise UsageError(
            "there are no servers to send a pickled optimizer to: call set_optimizer on every rank"
        )
    if head in _METHODS:
        raise UsageError(f"command {head}: there are no servers; call {_METHODS[head]} on every rank")
    if head not in _NOTHING_TO_DO:
        _log.warning("unknown command for servers ignored (%d, %.50s): there are no servers", head, body)


def dead_nodes(runtime: Runtime, node_id: int) -> int:
    """Return how many nodes of a group are known to be dead.

    Args:
        runtime: of this process.
        node_id: ps-lite's numbers of groups: 1 the scheduler, 2 servers, 4 workers, or a sum of these.

    Raises:
        UsageError: the number is not a group's; single nodes have ranks here.
    """
    if not 0 < node_id <= _SCHEDULER_GROUP + _NODE_GROUPS:
        raise UsageError(
            f"get_num_dead_node({node_id}): 1 is the scheduler, 2 are servers and 4 workers (every node is "
            "both), 7 are all"
        )
    failure = runtime.failure
    nodes = bool(node_id & _NODE_GROUPS) and isinstance(failure, NodeLost)
    return int(nodes or (bool(node_id & _SCHEDULER_GROUP) and isinstance(failure, SchedulerLost)))

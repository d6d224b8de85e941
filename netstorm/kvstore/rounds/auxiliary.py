"""Auxiliary paths: parts for neighbours that have some wait here until their path is decided. Pure.

Which part takes which path, and when, `paths.dispatch` says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from netstorm.kvstore.paths.dispatch import AuxiliaryOptions, Dispatch
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.round import Extension, PartTag
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan, Policy

__all__ = ["AuxiliaryPaths"]


class AuxiliaryPaths(Extension):
    """The parts of one node that wait for their path.

    Attributes:
        dispatch: holds them.
    """

    def __init__(self, rounds: Aggregation, options: AuxiliaryOptions) -> None:
        self.dispatch: Final = Dispatch(options, rounds.counters)
        self._rounds: Final = rounds

    def policy_known(self, policy: Policy) -> None:
        """Plug in with the first policy that has such paths."""
        if policy.detours:
            self._rounds.extend(self)

    def reroutes(self, send: Send, tag: PartTag, plan: Plan) -> bool:
        """Keep a part for a neighbour to which there are other paths."""
        if tag.peer not in plan.detours:
            return False
        self.dispatch.enqueue(send, plan.detours[tag.peer])
        return True

    def queues(self, send: Send) -> bool:
        """Keep a part that this node only forwards, if others wait for the same neighbour: it has a turn."""
        if int(send.peer) not in self.dispatch.backlogs:
            return False
        self.dispatch.enqueue(send)
        return True

    def taken_back(self, wanted: Callable[[Hashable], bool]) -> list[Send]:
        """Return the parts that wait here and are `wanted`, which then wait no more."""
        return self.dispatch.take_out(wanted)

    def clear(self) -> None:
        """Drop all parts."""
        self.dispatch.clear()

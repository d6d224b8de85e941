"""Parts that leave this node: sums to parents, results to children, and what is forwarded for others. Pure.

They go to links at once, wait for their turn where a neighbour has auxiliary paths (`dispatch`), or take the
path that a policy that has taken over has for them (`takeover`). What has not left can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.dispatch import Dispatch
from netstorm.kvstore.paths.relay import forwarded_send
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import PartTag, Takeover
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer, Checksum
from netstorm.protocol.ids import Peer, bits_to_wire
from netstorm.protocol.messages import LossTerms, Part, Phase
from netstorm.pslite.machine import Order, Send, TakeBack
from netstorm.topology.policy import Plan

__all__ = ["Outgoing"]

_RESULTS_AHEAD: Final = 1 << 62
"""Bytes that results are ahead of sums in rounds that may end without late sums: more than a job has."""


class Outgoing:
    """The outgoing parts of one node."""

    def __init__(self, dispatch: Dispatch, takeover: Takeover, outbox: Outbox, counters: Counters) -> None:
        self._counters: Final = counters
        self._dispatch: Final = dispatch
        self._takeover: Final = takeover
        self._outbox: Final = outbox

    def send_up(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum, which is complete for this subtree, to the parent."""
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total, loss = round.sum_of(chunk), round.loss
        self._send(
            plan.reduce_parent[tree],
            round,
            chunk,
            plan=plan,
            tree=tree,
            phase=Phase.REDUCE,
            contributors=total.contributors,
            # A late contribution may be on its way when the result is here, and the user's memory changes.
            payload=total.to_send() if loss is None else total.to_keep(),
            loss=None if loss is None else loss.terms_of(chunk, plan.version),
            crc=None,
            priority=round.priority,
            settled=round.settled.get(chunk, -1),
        )
        round.mark_sent(chunk)

    def send_down(
        self,
        round: Round,
        chunk: int,
        payload: Buffer | None,
        crc: int | None,
        priority: int,
        *,
        contributors: int,
    ) -> None:
        """Send a chunk's result to the children.

        Args:
            round: the chunk's.
            chunk: its number.
            payload: the result; None: zeros.
            crc: its checksum; None: not known.
            priority: the root's; a node without an operation of its own does not know it.
            contributors: bit set of the ranks that are in the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        children = plan.broadcast_children[tree]
        receivers = round.receivers_of(chunk)
        checksum = Checksum(payload) if crc is None and payload is not None and children else crc
        for child in children:
            wanted = receivers is None or receivers & plan.broadcast_mask[tree][child]
            self._send(
                child,
                round,
                chunk,
                plan=plan,
                tree=tree,
                phase=Phase.BROADCAST,
                contributors=contributors,
                payload=payload if wanted else None,
                loss=None if round.loss is None else round.loss.terms,
                crc=checksum,
                priority=priority,
                settled=round.settled.get(chunk, -1),
            )

    def forward(self, part: Part, payload: Buffer | None, payload_crc: int | None, offset: int) -> bool:
        """Forward a part along its auxiliary path, without looking into it; False if the path ends here.

        Args:
            part: of any node.
            payload: the part's.
            payload_crc: the payload's checksum.
            offset: of its chunk among the job's bytes; 0: not known.
        """
        send = forwarded_send(part, payload, payload_crc, (-part.priority, part.round, offset))
        if send is None:
            return False
        if self._dispatch.has_backlog(int(send.peer)):
            self._dispatch.enqueue(send)
        else:
            self._outbox.add(send)
        return True

    def reroute_results(self, results: list[Send]) -> None:
        """Send results over the trees of the policy that has taken over."""
        self._counters.add("results_around", len(results))
        self._outbox.add_all(self._takeover.rerouted(results))

    def take_back(
        self, wanted: Callable[[Hashable], bool], then: Callable[[list[Send]], None] | None = None
    ) -> None:
        """Take back the parts whose tag is `wanted`, as far as they have not left.

        Args:
            wanted: called with tags (`PartTag` for parts of trees).
            then: called with what waits here and, later, with what waits at links; None: drop it.
        """
        taken = self._dispatch.take_out(wanted)
        if then is not None:
            then(taken)
        self._outbox.add(TakeBack(wanted=wanted, then=then))

    def _send(
        self,
        to: int,
        round: Round,
        chunk: int,
        *,
        plan: Plan,
        tree: int,
        phase: Phase,
        contributors: int,
        payload: Buffer | None,
        loss: LossTerms | None,
        crc: int | Checksum | None,
        priority: int,
        settled: int,
    ) -> None:
        layout = round.layout
        offsets = layout.offsets
        if round.loss is not None and round.loss.offsets is not None:
            offsets = round.loss.offsets
        part = Part(
            key=round.key.identity,
            round=round.round,
            chunk=chunk,
            phase=phase,
            version=plan.version,
            tree=tree,
            contributors=bits_to_wire(contributors),
            dtype=round.key.spec.dtype,
            priority=priority,
            codec=round.form.codec,
            call=round.call,
            settled=settled,
            loss=loss,
        )
        # A result must arrive; what is late of a sum need not.
        ahead = _RESULTS_AHEAD if loss is not None and phase is Phase.BROADCAST else 0
        order: Order = (-priority, round.round, offsets[chunk] - ahead)
        tag = PartTag(part.key, part.round, chunk, phase, part.version, layout.slots[chunk], to)
        send = Send(
            peer=Peer(to),
            message=part,
            payload=payload,
            order=order,
            payload_crc=None if payload is None else crc,
            tag=tag,
        )
        detours = plan.detours
        if self._takeover.avoids_link(tag):
            self.reroute_results([send])
        elif detours and to in detours:
            self._dispatch.enqueue(send, detours[to])
        else:
            self._outbox.add(send)

"""Parts that other nodes send: which of them count, and for which round. Pure.

A part may come before what it refers to is known, and after what it was for is over. The former are kept, the
latter are dropped; all others are checked against what the scheduler has fixed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.complete_rounds import CompleteRounds
from netstorm.kvstore.rounds.early_parts import EarlyParts
from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.part_checks import check_part, check_result, check_sum_is_in
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.kvstore.rounds.views.view_changes import ViewChanges
from netstorm.kvstore.rounds.withheld_sums import Owner
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import LossTerms, Part, Phase
from netstorm.pslite.waiting_bytes import WaitingBytes
from netstorm.topology.policy import Plan

__all__ = ["Incoming"]

_log = logging.getLogger(__name__)


class Incoming:
    """The received parts of one node."""

    def __init__(
        self,
        *,
        keys: Mapping[int, Key],
        rounds: Mapping[Owner, Round],
        complete: CompleteRounds,
        bindings: Bindings,
        takeover: Takeover,
        views: ViewChanges,
        outgoing: Outgoing,
        loss: BoundedLoss,
        counters: Counters,
        waiting: WaitingBytes,
        find_round: Callable[[Key, int, int, Form, int], Round],
        forward: Callable[[Round, int], None],
        deliver: Callable[[Round, int, Buffer | None, int], None],
    ) -> None:
        """Begin without parts.

        Args:
            keys: by number.
            rounds: the open rounds.
            complete: which rounds are complete here.
            bindings: which policy a round runs under.
            takeover: which chunks have moved.
            views: tells which parts are of a view before, or are results that were agreed on.
            outgoing: sends results to the children.
            loss: ends rounds without some contributions.
            counters: of the process.
            waiting: counts what is kept early.
            find_round: returns a round of a key by number, policy version, form and call; it is made if there
                is none.
            forward: sends a chunk's sum on if it is complete for this subtree.
            deliver: writes a chunk's result, with its contributors, to the user's destination.
        """
        self._keys: Final = keys
        self._rounds: Final = rounds
        self._complete: Final = complete
        self._bindings: Final = bindings
        self._takeover: Final = takeover
        self._views: Final = views
        self._outgoing: Final = outgoing
        self._loss: Final = loss
        self._counters: Final = counters
        self._find_round: Final = find_round
        self._forward: Final = forward
        self._deliver: Final = deliver
        self._early: Final = EarlyParts(counters, waiting)

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Handle a part of a tree neighbour.

        Raises:
            ProtocolViolation: the part cannot belong to what the scheduler has fixed.
            NoRoom: it would have to wait, and too much waits already.
        """
        key = self._keys.get(part.key)
        plan = None if key is None else self._bindings.plan(part.version, key.spec.members)
        if part.version < self._views.version:
            self._counters.add("parts_of_former_views")
        elif key is None or plan is None or self._views.changing:
            self._early.keep(peer, part, payload, payload_crc)
        elif (part.key, part.round) in self._complete:
            self._counters.add("parts_of_complete_rounds")
        elif part.phase is Phase.RECOVERY:
            self._recover(peer, part, payload, key, plan)
        elif not self._waits_for_move(peer, part, payload, payload_crc, plan):
            self._take(peer, part, payload, key, plan, payload_crc=payload_crc)

    def receive_early(self, key: int) -> None:
        """Handle the parts of a key that came before something about it had changed."""
        for early in self._early.take(key):
            self._early.begin_again(early)
            try:
                self.receive(early.peer, early.part, early.payload, early.payload_crc)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a part that rank %d sent early: %s", early.peer, error)

    def clear(self) -> None:
        """Drop all parts that came early."""
        self._early.clear()

    def _waits_for_move(
        self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None, plan: Plan
    ) -> bool:
        """Drop a part of a chunk that has moved, and keep one whose chunk's move is not announced yet.
        Return whether the part was one of these.
        """
        bound = self._bindings.version_of(part.key, part.round)
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            self._counters.add("parts_of_moved_chunks")
            return True
        current = bound if moved is None else moved
        later = plan.policy.takes_over and (current is None or part.version > current)
        if later or (moved is not None and bound is None):
            self._early.keep(peer, part, payload, payload_crc)
            return True
        return False

    def _take(
        self,
        peer: Peer,
        part: Part,
        payload: Buffer | None,
        key: Key,
        plan: Plan,
        *,
        payload_crc: int | None,
    ) -> None:
        """Add a sum to that of this node, or take a result."""
        bound = self._bindings.version_of(part.key, part.round)
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        form, contributors = check_part(
            peer,
            part,
            payload,
            key=key,
            plan=plan,
            complete=self._complete.up_to(part.key) + self._views.lag(plan) + self._loss.lag(key, part),
            bound=bound if moved is None else moved,
        )
        version = part.version if bound is None else bound
        found = self._rounds.get((part.key, part.round))
        if (
            found is not None
            and found.operation is None
            and not (found.version == version and found.accepts(form, part.call))
        ):  # the one that has come before may be wrong: that shows once this rank's operation is here
            self._early.keep(peer, part, payload, payload_crc)
            return
        round = self._find_round(key, part.round, version, form, part.call)
        if part.version != round.plan_of(part.chunk).version:  # it has moved just now
            self._counters.add("parts_of_moved_chunks")
        elif part.phase is Phase.REDUCE:
            if part.loss is not None and not self._may_still_count(round, part, part.loss, contributors):
                return
            total = round.sum_of(part.chunk)
            if total.contributors & contributors:
                self._counters.add("contributions_counted_before")
                return
            total.add_received(payload, contributors)
            round.record_settled(part.chunk, part.settled)
            self._forward(round, part.chunk)
        elif round.results[part.chunk]:
            self._counters.add("results_known_before")
        else:
            check_sum_is_in(peer, part, round)
            round.settled[part.chunk] = part.settled
            if part.loss is not None:
                self._loss.open(round, part.loss)
            self._outgoing.send_down(
                round, part.chunk, payload, payload_crc, part.priority, contributors=contributors
            )
            self._deliver(round, part.chunk, payload, contributors)

    def _may_still_count(self, round: Round, part: Part, terms: LossTerms, contributors: int) -> bool:
        """Note a part of a round that may end without some; return whether it may still be in the result."""
        loss = self._loss.open(round, terms)
        if round.results[part.chunk]:
            self._counters.add("contributions_too_late")
            return False
        if loss.passed(part.chunk, part.version) & contributors:
            self._counters.add("contributions_counted_before")
            return False
        if not round.sum_of(part.chunk).contributors & contributors:
            loss.add_mass(part.chunk, part.version, terms.mass)
        return True

    def _recover(self, peer: Peer, part: Part, payload: Buffer | None, key: Key, plan: Plan) -> None:
        """Take a result from a rank that has it, after a change of the view."""
        self._views.check_recovery(peer, part)
        form, contributors = check_result(part, payload, key, plan)
        round = self._find_round(key, part.round, part.version, form, part.call)
        if not round.results[part.chunk]:
            self._deliver(round, part.chunk, payload, contributors)

    def relay(self, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Forward a part along its auxiliary path, without looking into it; False if the path ends here."""
        key = self._keys.get(part.key)
        offset = 0 if key is None else key.offset_of(part.chunk)
        if not self._outgoing.forward(part, payload, payload_crc, offset):
            return False
        self._counters.add("relayed")
        return True

    def is_obsolete(self, part: Part) -> bool:
        """Return whether a sum need not be sent: its result is here, or its chunk has moved."""
        if (part.key, part.round) in self._complete:
            return True
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            return True
        round = self._rounds.get((part.key, part.round))
        return round is not None and round.results[part.chunk]

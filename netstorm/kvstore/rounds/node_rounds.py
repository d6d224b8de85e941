"""The rounds of a general node with all techniques that options ask for. Pure.

A new technique is a module with an `Extension`, and a line in `NodeRounds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from netstorm.kvstore.forms import Key, UndeterminedForm
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.auxiliary import AuxiliaryPaths
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.look_ahead import LookAhead
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.kvstore.rounds.views import ViewChanges
from netstorm.observe.log import Counters
from netstorm.protocol.messages import ANY_RULE, Moved, ViewAgreed
from netstorm.pslite.machine import Links, WaitingBytes
from netstorm.topology.policy import Plan

__all__ = ["NodeRounds", "ZeroContributions"]


class NodeRounds(Aggregation):
    """All open rounds of one node, and what changes their way.

    Attributes:
        views: how rounds under way end when nodes leave or join, and where a later one's program begins.
        takeover: which chunks have moved to policies that take over.
        look_ahead: sums that are withheld.
        loss: rounds that may end without some contributions.
        dispatch: parts for neighbours that have auxiliary paths.
    """

    def __init__(
        self,
        rank: int,
        bindings: Bindings,
        outbox: Outbox,
        counters: Counters,
        auxiliary: AuxiliaryOptions | None = None,
        *,
        elastic: bool = False,
        waiting: WaitingBytes | None = None,
        reproducible: bool = False,
    ) -> None:
        super().__init__(rank, bindings, outbox, counters, waiting=waiting, reproducible=reproducible)
        self.views: Final = ViewChanges(self)
        self.takeover: Final = Takeover(self)
        self.look_ahead: Final = LookAhead(self)
        self.loss: Final = BoundedLoss(self)
        auxiliary_paths = AuxiliaryPaths(self, auxiliary or AuxiliaryOptions())
        self.dispatch: Final = auxiliary_paths.dispatch
        self.techniques = (self.views, self.takeover, self.look_ahead, self.loss, auxiliary_paths)
        if elastic:
            self.extend(self.views)
        for plan in bindings.plans.values():
            self.policy_known(plan.policy)

    def new_policy(self, plan: Plan) -> None:
        """Install a policy; rounds under way move to it if it takes over, once the view is agreed on."""
        self.policy_known(plan.policy)
        self.views.set_members(plan.policy)
        self.takeover.new_policy(plan, later=self.views.changing)
        self.advance()

    def agree(self, message: ViewAgreed) -> bool:
        """Go on in a new view; return whether its change ends, see `ViewChanges`."""
        ended = self.views.agree(message)
        if ended:
            self.takeover.view_agreed(self.views.version)
            self.advance()
        return ended

    def chunks_moved(self, announcement: Moved) -> None:
        """Handle the announcement that chunks have moved to another policy.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        former = announcement.version < self.views.version  # everything has moved to the view's policy since
        if not former and (announcement.key, announcement.round) not in self.complete:
            self.takeover.moved(announcement)
            self.advance((announcement.key,))

    def run_dispatch(self, links: Links, now: float) -> None:
        """Send the chunks that wait for the state of links, as far as they leave now."""
        self.outbox.add_all(self.dispatch.run(links, now))

    def begin_at(self, rounds: Mapping[int, int]) -> None:
        """Go on with these rounds, by key: the program has the state of all before."""
        self.views.begin_at(rounds)
        self.advance(rounds)


# The zeros that a rank contributes after its program has ended, with NETSTORM_UNEVEN=join. Pure.
#
# A finished rank does not know which rounds the others will still push, and need not. It always contributes
# as far ahead of what is complete as a node may, so its zeros are there before any rank waits for them. Nor
# does it know whether the others will push dense arrays, rows or compressed ones: zeros have no payload, and
# a form of their own that any other form replaces.


class ZeroContributions:
    """Operations of zeros, one after the other, so that the other ranks' rounds complete.

    Attributes:
        pending: the keys of those that are to be taken.
    """

    def __init__(self) -> None:
        self.pending: Final[deque[Key]] = deque()

    def begin(self, keys: Iterable[Key]) -> None:
        """Contribute zeros to every round of `keys` that the program has not pushed.

        Args:
            keys: granted keys. Rounds of a key without elements complete without contributions. Collective
                rounds get no zeros: what a rank would contribute is not known.
        """
        for key in keys:
            if key.layout is not None and key.layout.chunks:
                self.pending.extend([key] * key.rounds_under_way)

    def take(self) -> list[Operation]:
        """Return the operations to submit now."""
        taken = []
        while self.pending:
            taken.append(self._next(self.pending.popleft()))
        return taken

    def _next(self, key: Key) -> Operation:
        def done(error: Exception | None) -> None:
            if error is None:
                self.pending.append(key)

        return Operation(
            key=key,
            round=key.take_round(),
            source=None,
            destination=None,
            done=done,
            rule=ANY_RULE,
            form=UndeterminedForm(),
            for_others=True,
        )

"""The rounds of a general node with all techniques that options ask for. Pure.

A new technique is a module with an `Extension`, and a line in `NodeRounds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from netstorm.kvstore.forms import Key, UndeterminedForm
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions, Dispatch
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.look_ahead import LookAhead
from netstorm.kvstore.rounds.round import Extension, PartTag
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.kvstore.rounds.views import ViewChanges
from netstorm.observe.log import Counters
from netstorm.protocol.messages import ANY_RULE, Moved, ViewAgreed
from netstorm.pslite.machine import Links, Send, WaitingBytes
from netstorm.topology.policy import Plan, Policy

__all__ = ["AuxiliaryPaths", "NodeRounds", "ZeroContributions"]


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


# The zeros that a rank contributes after its program has ended, with NETSTORM_UNEVEN=join.
#
# A finished rank does not know which rounds the others will still push, and need not. It always contributes
# as far ahead of what is complete as a node may, so its zeros are there before any rank waits for them. Nor
# does it know whether the others will push dense arrays, rows or compressed ones: zeros have no payload, and
# a form of their own that any other form replaces.


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

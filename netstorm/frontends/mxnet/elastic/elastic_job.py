"""The elastic job that a store belongs to: boundaries between steps, newcomers, and waits for nodes.

A boundary is before the push of a key that has been pushed since the last boundary: in between, the script
has pushed its keys once. Boundaries are counted from the begin of the job, so ranks that offer the state
before the same step offer the same bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from netstorm import clock
from netstorm.checkpoint.format import NumpyTensors, pack
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.checkpoint import KeptEntry, state_of_store
from netstorm.frontends.mxnet.elastic.copies import Group, Later, copy_behind, with_copies
from netstorm.frontends.mxnet.elastic.joining import JobState, fetch_state
from netstorm.frontends.mxnet.elastic.round_results import RoundResults
from netstorm.frontends.mxnet.elastic.script_states import Get, ScriptStates, Set
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.operations.encoded_sum import Agreed
from netstorm.kvstore.process.enough_nodes import wait_for_enough_nodes
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.state_transfer.snapshot import Snapshot
from netstorm.kvstore.values.key import Array, Key
from netstorm.protocol.frames import checksum

__all__ = ["ElasticEntry", "ElasticJob"]

_log = logging.getLogger(__name__)

_GRID: Final = 8
"""State is offered before steps whose number is a multiple of this, so that all offer the same step..."""
_SOON_S: Final = 1.0
"""... or before the next step, once a newcomer has waited for so long."""


class Agreeing(Protocol):
    """What compression keeps of a key."""

    def agreed(self) -> Agreed | None:
        """Return what the codec has agreed on with the other ranks; None: nothing."""

    def begin_agreed(self, state: Array) -> None:
        """Begin with what the other ranks have agreed on."""


class ElasticEntry(KeptEntry, Protocol):
    """One key of a store."""

    pushed_in: int
    """The step in which it was last pushed."""
    contributors: int
    """Bit set of the ranks in its last complete round."""
    holds_sum: bool
    """Its value is the last sum: there is no updater."""
    first_rounds: Mapping[str, int]
    """The first rounds of all keys that there were before this rank came, by name."""

    @property
    def key(self) -> Key:
        """The network's key."""

    @property
    def further_keys(self) -> list[Key]:
        """The keys that a codec needs besides this one, in each push."""

    @property
    def has_deferred(self) -> bool:
        """Whether another thread queues its updates."""

    @property
    def kept(self) -> Agreeing | None:
        """What compression keeps; None: nothing is compressed."""


class ElasticJob:
    """One store's part in an elastic job. Everything is called on the script's thread.

    Attributes:
        results: of the store's rounds.
        script: what the script has attached.
        joined_with: the state that this node has fetched; None: it was there from the begin, or has not
            fetched it yet.
        kept_by_script: keys whose values this script sets itself when it joins.
    """

    def __init__(self, runtime: Runtime, helpers: Mapping[str, Key]) -> None:
        """Begin; `helpers` are the keys of checkpoints."""
        settings = runtime.settings
        self.results: Final = RoundResults(settings.num_workers, rescales=settings.rescale)
        self.script: Final = ScriptStates()
        self.joined_with: JobState | None = None
        self.kept_by_script: Final[set[int | str]] = set()
        self._runtime: Final = runtime
        self._helpers: Final = helpers
        self._live: Final = runtime.node.requests.live
        self._fewest: Final = (settings.elastic_range or (1, 1))[0]
        self._step = 0
        self._barriers = 0
        self._asked_at: float | None = None
        self._making = False
        self._has_pushed = False

    # -------------------------------------------------------------------------------------- who is in the job

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job now."""
        return self._live.ranks

    # ------------------------------------------------------------------------------------------ as a newcomer

    def prepare(self) -> JobState | None:
        """Fetch the job's state, if this node has joined later and does not have it; return it.

        Raises:
            WaitTimeout: nothing has come for too long.
            NetStormError: the job has failed.
        """
        if self.joined_with is None and self._runtime.node.requests.needs_state:
            self.joined_with = state = fetch_state(self._runtime)
            self._step, self._barriers = state.step, state.barriers
            self.script.receive(state.script)
        return self.joined_with

    def attach(self, name: str, get: Get, take: Set) -> None:
        """Attach a state of the script's."""
        self.prepare()
        self.script.attach(name, get, take)

    def begin_key(self, entry: ElasticEntry) -> bool:
        """Give a new key the rounds of the job; return whether the job has its value."""
        state, user_key = self.prepare(), entry.user_key
        if state is None or user_key not in state.kept:
            return False
        entry.key.begin_at(state.next_rounds[str(user_key)])
        entry.first_rounds = state.next_rounds
        if entry.kept is not None and user_key in state.agreed:
            entry.kept.begin_agreed(state.agreed[user_key])
        entry.holds_sum = user_key in state.sums
        return True

    def optimizer_set(self, rule: UpdateRule) -> None:
        """Give a newcomer's optimizer the scale of gradients that the others have, so that all stay equal."""
        state = self.joined_with
        if state is not None and state.rescale_grad is not None and rule.optimizer is not None:
            rule.optimizer.rescale_grad = state.rescale_grad

    def check_pull_of_new(self, user_key: object) -> None:
        """Raise `UsageError` if a newcomer's weight would be overwritten by a sum of gradients."""
        state = self.joined_with
        if state is not None and user_key in state.sums and user_key not in self.kept_by_script:
            raise UsageError(
                f"broadcast of key {user_key!r}: the job's value of it is a sum, as the scripts update their "
                "weights themselves (update_on_kvstore=False), and a rank that joins later needs those: "
                "call kv.attach_trainer(trainer) on all ranks before the first step, or attach_state"
            )

    @property
    def has_just_joined(self) -> bool:
        """Whether this node has joined later, and its script has pushed nothing yet."""
        return self.joined_with is not None and not self._has_pushed

    def passes_barrier(self) -> bool:
        """Return whether a barrier is one that the job has passed: a newcomer's before its first push."""
        self.prepare()
        passed = self.has_just_joined
        self._barriers += not passed
        return passed

    # ------------------------------------------------------------------------------------------- at each step

    def before_push(
        self,
        pushed: Iterable[ElasticEntry],
        entries: Callable[[], Sequence[ElasticEntry]],
        rule: UpdateRule | None,
    ) -> None:
        """Find out whether this push begins a step. If so, wait for nodes, and offer the state to newcomers.

        Raises:
            WaitTimeout: too few nodes have come in time.
            NetStormError: the job has failed.
        """
        step = self._step
        begins = False
        for entry in pushed:
            begins = begins or entry.pushed_in == step
        if begins:
            self._step = step = step + 1
            self._at_boundary(entries, rule, on_grid=True)
        self._has_pushed = True
        for entry in pushed:
            entry.pushed_in = step
            entry.holds_sum = rule is None

    def begin_period(self, entries: Callable[[], Sequence[ElasticEntry]], rule: UpdateRule | None) -> None:
        """Begin a step before which all ranks have had the same values, of a store in which they have not
        always: it counts periods in place of steps. Optimizers of ranks have states of their own, so a
        newcomer takes what one rank offers. A newcomer's first period is one that the others have begun.

        Raises:
            WaitTimeout: too few nodes have come in time.
            NetStormError: the job has failed.
        """
        if self._has_pushed or self.joined_with is None:
            self._step += 1
            self._at_boundary(entries, rule, on_grid=False)
        self._has_pushed = True

    @property
    def contributes(self) -> bool:
        """Whether this node's values are in the sums of rounds that begin now."""
        return self._runtime.rank in self._live.contributors

    def finish(self, entries: Sequence[ElasticEntry], rule: UpdateRule | None) -> None:
        """Offer the state at the end of the script to all who come later: nobody else can."""
        if entries and self._runtime.failure is None:
            self._step += 1
            self._offer(entries, rule, last=True).join()

    def _at_boundary(
        self, entries: Callable[[], Sequence[ElasticEntry]], rule: UpdateRule | None, *, on_grid: bool
    ) -> None:
        live = self._live
        if live.has_newcomers and not self._making:
            now = clock.monotonic()
            self._asked_at = now if self._asked_at is None else self._asked_at
            soon = self._step % _GRID == 0 or now - self._asked_at >= _SOON_S
            if soon or not on_grid:
                self._offer(entries(), rule)
        if len(live.ranks) < self._fewest:
            self._wait_for_nodes(entries(), rule)

    def _wait_for_nodes(self, entries: Sequence[ElasticEntry], rule: UpdateRule | None) -> None:
        def serve() -> None:
            if self._live.has_newcomers and not self._making:
                self._offer(entries, rule)

        wait_for_enough_nodes(self._runtime, serve)

    # ---------------------------------------------------------------------------------------- for newcomers

    def _offer(
        self, entries: Sequence[ElasticEntry], rule: UpdateRule | None, *, last: bool = False
    ) -> threading.Thread:
        """Have the state copied, and offered once it is: behind everything that is queued now."""
        self._making, self._asked_at = True, None
        runtime, step, barriers = self._runtime, self._step, self._barriers
        requests = None if last else self._live.state_requests
        state = state_of_store(entries, rule, None, tree=lambda value: value)
        states = state["states"]
        script, arrays = self.script.collect()
        kept = [(entry.user_key, entry.kept) for entry in entries]
        agreed = {key: Later(one.agreed) for key, one in kept if one is not None}
        groups = [_group(entry, states.get(entry.user_key), agreed.get(entry.user_key)) for entry in entries]
        groups.append(Group(arrays))
        keys = [key for entry in entries for key in (entry.key, *entry.further_keys)]
        state |= _counts(entries, rule, self._helpers)
        state["script"] = script
        next_rounds = {key.name: key.last_taken + 1 for key in keys}
        keys += self._helpers.values()
        following = {key: key.last_taken + 1 for key in keys}

        def offer(copies: Mapping[int, object] | None) -> None:
            if copies is None:
                self._making = False
                return
            codecs = [(key, copies[id(later)]) for key, later in agreed.items()]
            found = {key: one for key, one in codecs if isinstance(one, Agreed)}
            occasional = {key: number for one in found.values() for key, number in one.rounds.items()}
            state["agreed"] = {key: one.state for key, one in found.items() if one.state is not None}
            state["next_rounds"] = next_rounds | {key.name: number for key, number in occasional.items()}
            content = pack(with_copies(state, copies), NumpyTensors())
            rounds = following | occasional
            snapshot = Snapshot(
                step=step,
                content=content,
                crc=checksum(content),
                rounds={key.identity: number for key, number in rounds.items() if key.identity >= 0},
                barriers=barriers,
                requests=requests,
            )
            _log.info("the state before step %d is offered to newcomers: %d bytes", step, snapshot.nbytes)
            runtime.post(lambda node, now: node.requests.offer_state(snapshot, now))
            runtime.post(lambda _node, _now: self._offered())

        return copy_behind(groups, offer, lambda: runtime.failure is not None)

    def _offered(self) -> None:
        self._making = False


def _group(entry: ElasticEntry, state: object, agreed: Later | None) -> Group:
    states = list(_arrays_in(state))
    return Group(
        [entry.value, *states], states if entry.has_deferred else (), () if agreed is None else (agreed,)
    )


def _arrays_in(state: object) -> Iterable[NDArray]:
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _arrays_in(item)
    elif isinstance(state, NDArray):
        yield state


def _counts(
    entries: Sequence[ElasticEntry], rule: UpdateRule | None, helpers: Mapping[str, Key]
) -> dict[str, Any]:
    """Return the plain values of a state."""
    optimizer = None if rule is None else rule.optimizer
    return {
        "rounds": {str(entry.user_key): entry.rounds for entry in entries},
        "helpers": {name: key.last_taken + 1 for name, key in helpers.items()},
        "sums": [entry.user_key for entry in entries if entry.holds_sum],
        "rescale_grad": None if optimizer is None else optimizer.rescale_grad,
        "rule": "" if rule is None else rule.origin,
    }

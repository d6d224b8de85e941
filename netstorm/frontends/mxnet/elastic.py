"""The elastic job that a store belongs to: boundaries between steps, newcomers, and waits for nodes.

A boundary is before the push of a key that has been pushed since the last boundary: in between, the script
has pushed its keys once. Boundaries are counted from the begin of the job, so ranks that offer the state
before the same step offer the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import numpy as np

from netstorm import clock
from netstorm.checkpoint.format import NumpyTensors, pack, unpack
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays import StagingBuffer, memory_of, rows_of
from netstorm.frontends.mxnet.checkpoint import (
    KeptState,
    from_tree,
    mapped,
    optimizer_values,
    restore_optimizer_values,
    state_of_store,
)
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.entries import AnyEntry
from netstorm.frontends.mxnet.updates import CalledUpdater
from netstorm.kvstore.calls import Agreed
from netstorm.kvstore.forms import Key
from netstorm.kvstore.process.elastic import fetch_state, offer_state, wait_for_enough_nodes
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.frames import ranks_in
from netstorm.training.averages import in_all_parts
from netstorm.training.round_results import StoreRoundResults
from netstorm.training.samplers import SampleShares

__all__ = [
    "ArrayGroup",
    "ElasticJob",
    "ElasticSampler",
    "Get",
    "Set",
    "copy_behind",
    "trainer_state",
    "with_copies",
]


_log = logging.getLogger(__name__)

_GRID: Final = 8
"""State is offered before steps whose number is a multiple of this, so that all offer the same step..."""
_SOON_S: Final = 1.0
"""... or before the next step, once a newcomer has waited for so long."""


class ElasticJob:
    """One store's part in an elastic job. Everything is called on the script's thread.

    Attributes:
        live: who is in the job.
        results: of the store's rounds.
        script: what the script has attached.
        joined_with: the state that this node has fetched; None: it was there from the begin, or has not
            fetched it yet.
        kept_by_script: keys whose values this script sets itself when it joins.
    """

    def __init__(self, runtime: Runtime, helpers: Mapping[str, Key]) -> None:
        """Begin; `helpers` are the keys of checkpoints."""
        settings = runtime.settings
        self.results: Final = StoreRoundResults(settings.num_workers, rescales=settings.rescale)
        self.script: Final = ScriptStates()
        self.joined_with: StepState | None = None
        self.kept_by_script: Final[set[int | str]] = set()
        self._samplers: Final[list[ElasticSampler]] = []
        self._runtime: Final = runtime
        self._helpers: Final = helpers
        self.live: Final = runtime.node.live
        self._fewest: Final = (settings.elastic_range or (1, 1))[0]
        self._step = 0
        self._barriers = 0
        self._asked_at: float | None = None
        self._making = False
        self._has_pushed = False

    # ------------------------------------------------------------------------------------------ as a newcomer

    def prepare(self) -> StepState | None:
        """Fetch the job's state, if this node has joined later and does not have it; return it.

        Raises:
            WaitTimeout: nothing has come for too long.
            NetStormError: the job has failed.
        """
        if self.joined_with is None and self._runtime.node.needs_state:
            self.joined_with = state = _fetch(self._runtime)
            self._step, self._barriers = state.step, state.barriers
            self.script.receive(state.script)
        return self.joined_with

    def attach(self, name: str, get: Get, take: Set) -> None:
        """Attach a state of the script's."""
        self.prepare()
        self.script.attach(name, get, take)

    def begin_key(self, entry: AnyEntry) -> bool:
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

    def optimizer_set(self, rule: CalledUpdater) -> None:
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
        pushed: Iterable[AnyEntry],
        entries: Callable[[], Sequence[AnyEntry]],
        rule: CalledUpdater | None,
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
        if begins or not self._has_pushed:
            self.skip_samples(0)
        self._has_pushed = True
        for entry in pushed:
            entry.pushed_in = step
            entry.holds_sum = rule is None

    def begin_period(self, entries: Callable[[], Sequence[AnyEntry]], rule: CalledUpdater | None) -> None:
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

    def skip_samples(self, steps: int) -> None:
        """Have samplers know that a step has begun, after which this rank skips some."""
        for sampler in self._samplers:
            sampler.step_begins()
            sampler.skip(steps)

    def share_samples(self, sampler: ElasticSampler, entries: Sequence[AnyEntry]) -> None:
        """Tell a sampler who was in the last step; waits for its results."""
        last = max((entry.pushed_in for entry in entries), default=-1)
        ranks = sampler.ranks
        if last >= 0:
            pushed = [entry for entry in entries if entry.pushed_in == last]
            for entry in pushed:
                entry.value.wait_to_read()
            together = in_all_parts(entry.contributors for entry in pushed)
            ranks = tuple(ranks_in(together)) or ranks
        sampler.set_ranks(self._runtime.rank, ranks, counts=self.live.contributes)

    def attach_sampler(self, sampler: ElasticSampler, entries: Callable[[], Sequence[AnyEntry]]) -> None:
        """Have a sampler share its samples among the ranks of each step."""
        first = tuple(sorted(member.rank for member in self.live.first_members))
        sampler.set_ranks(self._runtime.rank, first)
        self.attach(f"place of sampler {len(self._samplers)}", sampler.place, sampler.go_on_at)
        sampler.share_by(lambda: self.share_samples(sampler, entries()))
        self._samplers.append(sampler)

    def finish(self, entries: Sequence[AnyEntry], rule: CalledUpdater | None) -> None:
        """Offer the state at the end of the script to all who come later: nobody else can."""
        if entries and self._runtime.failure is None:
            self._step += 1
            self._offer(entries, rule, last=True).join()

    def _at_boundary(
        self, entries: Callable[[], Sequence[AnyEntry]], rule: CalledUpdater | None, *, on_grid: bool
    ) -> None:
        live = self.live
        if live.has_newcomers and not self._making:
            now = clock.monotonic()
            self._asked_at = now if self._asked_at is None else self._asked_at
            soon = self._step % _GRID == 0 or now - self._asked_at >= _SOON_S
            if soon or not on_grid:
                self._offer(entries(), rule)
        if len(live.ranks) < self._fewest:
            self._wait_for_nodes(entries(), rule)

    def _wait_for_nodes(self, entries: Sequence[AnyEntry], rule: CalledUpdater | None) -> None:
        def serve() -> None:
            if self.live.has_newcomers and not self._making:
                self._offer(entries, rule)

        wait_for_enough_nodes(self._runtime, serve)

    # ---------------------------------------------------------------------------------------- for newcomers

    def _offer(
        self, entries: Sequence[AnyEntry], rule: CalledUpdater | None, *, last: bool = False
    ) -> threading.Thread:
        """Have the state copied, and offered once it is: behind everything that is queued now."""
        self._making, self._asked_at = True, None
        runtime, step, barriers = self._runtime, self._step, self._barriers
        requests = None if last else self.live.state_requests
        state = state_of_store(entries, rule, None, tree=lambda value: value)
        states = state["states"]
        script, arrays = self.script.collect()
        kept = [(entry.user_key, entry.kept) for entry in entries]
        agreed = {key: residual.agreed for key, residual in kept if residual is not None}
        groups = [_group(entry, states.get(entry.user_key), agreed.get(entry.user_key)) for entry in entries]
        groups.append(ArrayGroup(arrays))
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
            read = [(key, copies[id(of_codec)]) for key, of_codec in agreed.items()]
            codecs = [(key, of_codec) for key, of_codec in read if isinstance(of_codec, Agreed)]
            occasional = {key: number for _, codec in codecs for key, number in codec.rounds.items()}
            state["agreed"] = {key: codec.state for key, codec in codecs if codec.state is not None}
            state["next_rounds"] = next_rounds | {key.name: number for key, number in occasional.items()}
            content = pack(with_copies(state, copies), NumpyTensors())
            rounds = following | occasional
            offer_state(
                runtime,
                step,
                content,
                {key.identity: number for key, number in rounds.items() if key.identity >= 0},
                requests,
                barriers=barriers,
            )
            runtime.post(lambda _node, _now: self._offered())

        return copy_behind(groups, offer, lambda: runtime.failure is not None)

    def _offered(self) -> None:
        self._making = False


def _group(entry: AnyEntry, state: object, agreed: Callable[[], object] | None) -> ArrayGroup:
    states = list(_arrays_in(state))
    return ArrayGroup(
        [entry.value, *states], states if entry.has_deferred else (), () if agreed is None else (agreed,)
    )


def _arrays_in(state: object) -> Iterable[NDArray]:
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _arrays_in(item)
    elif isinstance(state, NDArray):
        yield state


def _counts(
    entries: Sequence[AnyEntry], rule: CalledUpdater | None, helpers: Mapping[str, Key]
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


# Copies of arrays as they are after all that is queued now; a thread makes them, and the script goes on.
#
# For each group of arrays, an operation that reads them is queued on MXNet's engine. While it lasts, nobody
# changes them: the next update of a key waits for the copy of this key alone.

_LOOK_S: Final = 0.5
"""How often the thread looks whether the job has failed."""


class ArrayGroup(NamedTuple):
    """Arrays that are copied together."""

    arrays: Sequence[NDArray]
    """On the host. Those of staging buffers, and states of optimizers."""
    settling: Sequence[NDArray] = ()
    """Those of them that another thread's operations change; these are queued when the first is ready."""
    values: Sequence[Callable[[], object]] = ()
    """Called with them: what they return is kept, too."""


def copy_behind(
    groups: Sequence[ArrayGroup],
    then: Callable[[Mapping[int, object] | None], None],
    is_over: Callable[[], bool],
) -> threading.Thread:
    """Queue the copies, and return the thread that makes them.

    Args:
        groups: what to copy.
        then: called by the thread, with the copies by the `id` of the array, or of the function: NumPy's
            arrays; of row-sparse ones the tree that checkpoints have. None: an operation of the script's own
            has failed.
        is_over: whether the job has ended: no copies are made any more.
    """
    started: queue.SimpleQueue[tuple[Completion, ArrayGroup] | None] = queue.SimpleQueue()

    given_up = threading.Event()

    def end_the_rest() -> None:
        """End operations that nobody copies for: what is queued behind them would wait for ever."""
        with contextlib.suppress(queue.Empty):
            while True:
                begun = started.get_nowait()
                if begun is not None:
                    begun[0].succeed()

    def run() -> None:
        copies = _copies(len(groups), started, is_over)
        if copies is None:
            given_up.set()
            end_the_rest()
        try:
            then(copies)
        except Exception:  # noqa: BLE001 -- training goes on, whatever the script's state may be
            _log.exception("the state for a newcomer cannot be offered")

    thread = threading.Thread(target=run, name="netstorm-snapshot", daemon=True)
    thread.start()
    for group in groups:
        settling = {id(array) for array in group.settling}

        def start(completion: Completion, group: ArrayGroup = group) -> None:
            started.put((completion, group))
            if given_up.is_set():
                end_the_rest()

        push_async(
            start,
            reads=[array for array in group.arrays if id(array) not in settling],
            writes=(),
            name="netstorm_snapshot",
            skipped=lambda: started.put(None),
        )
    return thread


def with_copies(state: object, copies: Mapping[int, object]) -> object:
    """Return a tree with copies in the places of arrays."""
    return mapped(state, lambda leaf: copies[id(leaf)] if isinstance(leaf, mx.nd.NDArray) else leaf)


def _copies(
    count: int, started: queue.SimpleQueue[tuple[Completion, ArrayGroup] | None], is_over: Callable[[], bool]
) -> Mapping[int, object] | None:
    copies: dict[int, object] = {}
    for _ in range(count):
        begun = _next(started, is_over)
        if begun is None:
            return None
        completion, group = begun
        try:
            for array in group.settling:
                array.wait_to_read()
            copies.update((id(array), _copied_array(array)) for array in group.arrays)
            copies.update((id(value), value()) for value in group.values)
        except Exception:  # noqa: BLE001 -- likewise
            _log.exception("the state for a newcomer cannot be copied")
            return None
        finally:
            completion.succeed()
    return copies


def _next(
    started: queue.SimpleQueue[tuple[Completion, ArrayGroup] | None], is_over: Callable[[], bool]
) -> tuple[Completion, ArrayGroup] | None:
    while True:
        try:
            return started.get(timeout=_LOOK_S)
        except queue.Empty:
            if is_over():
                return None


def _copied_array(array: NDArray) -> object:
    """Return the copy of an array that nobody changes now; waits for nothing."""
    if array.stype == "row_sparse":
        rows = rows_of(array)
        shape = tuple(array.shape)
        return {
            "stype": "row_sparse",
            "shape": shape,
            "indices": rows.numbers.copy(),
            "data": rows.values.reshape(len(rows), *shape[1:]).copy(),
        }
    return np.frombuffer(memory_of(array), array.dtype).reshape(array.shape).copy()


# What a script has that a newcomer needs, too: its place in the training data, weights of its own.
#
# Each is attached under a name, with a function that returns it and one that takes it over.

Get = Callable[[], object]
"""Returns dictionaries, lists, numbers, texts and arrays."""

Set = Callable[[Any], object]
"""Takes what a `Get` has returned at another rank; arrays are MXNet's, on the host."""


class ScriptStates:
    """The attached states of one script."""

    def __init__(self) -> None:
        self._attached: Final[dict[str, tuple[Get, Set]]] = {}
        self._received: dict[str, object] = {}

    def attach(self, name: str, get: Get, take: Set) -> None:
        """Attach a state. If it has been received, it is taken over now.

        Raises:
            UsageError: the name is taken.
        """
        if name in self._attached:
            raise UsageError(f"attach_state: {name!r} is attached already; give each state its own name")
        if name in self._received:
            take(mapped(self._received.pop(name), _as_mxnets))
        self._attached[name] = (get, take)

    def receive(self, states: dict[str, object]) -> None:
        """Keep the states of other ranks until they are attached."""
        self._received = dict(states)

    def collect(self) -> tuple[dict[str, object], list[NDArray]]:
        """Return the states by name, and the arrays in them: copies that are queued on MXNet's engine."""
        copies: list[NDArray] = []
        staged = {
            name: mapped(get(), functools.partial(_staged, name=name, copies=copies))
            for name, (get, _) in self._attached.items()
        }
        return staged, copies


def _staged(value: object, name: str, copies: list[NDArray]) -> object:
    if isinstance(value, mx.nd.NDArray):
        if value.stype != "default":
            raise UsageError(f"attach_state: {name!r} has a {value.stype} array: give dense ones")
        buffer = StagingBuffer.like(value)
        buffer.copy_from(value)
        copies.append(buffer.array)
        return buffer.array
    return value.copy() if isinstance(value, np.ndarray) else value


def _as_mxnets(value: object) -> object:
    if not isinstance(value, np.ndarray):
        return value
    with mx.util.np_shape(True):
        return from_tree(value)


class ElasticSampler(SampleShares):
    """Gives each rank its batches, in an order that all ranks know; `kv.attach_sampler` says who they are.

    Every epoch has a permutation of all samples. Each rank that contributed to the last step gets the next
    `batch_size` of them. All ranks agree on who did, so no sample is given twice, and the position is the
    same at all ranks whoever comes or goes. A rank that contributes for the first time trains on a batch that
    another one has, too. Samples at the end of an epoch that are too few for a batch of all ranks are left
    out. A rank that is catching up gets small batches.

    As the `batch_sampler` of a DataLoader it needs `num_workers=0`: workers fetch batches in advance, for
    ranks that may be gone by then.

    Args:
        length: number of samples.
        batch_size: of one rank.
        seed: of the permutations, the same at all ranks.
        shuffle: if not, samples come in their order.
        catch_up_size: of a rank that is catching up; 2, since BatchNorm refuses a single sample.

    Attributes:
        epoch: of the next batch, from 0.
        position: samples of this epoch that were given to any rank.
    """

    _share: Callable[[], None] | None = None
    """Calls `set_ranks`; only in an elastic job."""
    _before_step: dict[str, Any] | None = None
    """The place of the step's first batch: of who begins with this step."""

    def share_by(self, share: Callable[[], None]) -> None:
        """Have `share` called before each batch."""
        self._share = share

    def take(self) -> list[int]:
        """Return this rank's next batch: numbers of samples. Waits in an elastic job for the last step."""
        if self._share is not None:
            self._share()
        if self._before_step is None:
            self._before_step = self._place()
        return super().take()

    def step_begins(self) -> None:
        """Hear that all batches that were taken are those of steps that have begun."""
        self._before_step = None

    def place(self) -> dict[str, Any]:
        """Return where a rank begins that joins with the step that begins now."""
        return self._before_step or self._place()

    def go_on_at(self, place: dict[str, Any]) -> None:
        """Begin where another rank says."""
        self.load_state_dict(place)
        self.set_ranks(self.rank, tuple(place["ranks"]))

    def _place(self) -> dict[str, Any]:
        return {**self.state_dict(), "ranks": list(self.ranks)}


def trainer_state(trainer: mx.gluon.Trainer) -> tuple[Get, Set]:
    """Return the functions for a Trainer that updates the weights itself (`update_on_kvstore=False`).

    Its weights, the states of its updater and its optimizer's counts and rates travel; not the running
    statistics of a batch normalisation, which are each rank's own.
    """

    def parameters() -> list[mx.gluon.Parameter]:
        return [parameter for parameter in trainer._params if parameter.grad_req != "null"]  # noqa: SLF001

    def get() -> object:
        updater = trainer._updaters[0]  # noqa: SLF001 -- one for each device; all have the same states
        return {
            "weights": [parameter.list_data()[0] for parameter in parameters()],
            "states": dict(updater.states),
            "optimizer": optimizer_values(trainer._optimizer),  # noqa: SLF001
        }

    def take(state: Any) -> None:
        weights, own = state["weights"], parameters()
        if len(weights) != len(own):
            raise UsageError(
                f"attach_trainer: the job's model has {len(weights)} weights and this one {len(own)}: all "
                "ranks must train the same model"
            )
        for parameter, weight in zip(own, weights, strict=True):
            parameter.set_data(weight)
        restore_optimizer_values(trainer._optimizer, state["optimizer"])  # noqa: SLF001
        for updater in trainer._updaters:  # noqa: SLF001
            updater.states = mapped(
                state["states"], lambda leaf: leaf.copy() if isinstance(leaf, mx.nd.NDArray) else leaf
            )
            updater.states_synced = dict.fromkeys(updater.states, False)

    return get, take


# How a newcomer gets the job's state.


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of the job before one of its steps."""

    step: int
    barriers: int
    kept: KeptState
    """Values and states, until the script asks for them."""
    next_rounds: dict[str, int]
    """By key: the first round of the step."""
    helpers: dict[str, int]
    """The same of the keys that checkpoints use."""
    sums: frozenset[int | str]
    """Keys whose values are sums, because the script updates its weights itself."""
    rescale_grad: float | None
    agreed: dict[int | str, Any] = field(default_factory=dict)
    """By key: what codecs have agreed on, as an array."""
    script: dict[str, object] = field(default_factory=dict)
    """By name: what the scripts have attached."""


def _fetch(runtime: Runtime) -> StepState:
    """Block until this node has the job's state; errors as of `fetch_state`."""
    snapshot = fetch_state(runtime)
    state = cast("dict[str, Any]", unpack(snapshot.content, NumpyTensors()))
    return StepState(
        step=snapshot.step,
        barriers=snapshot.barriers,
        kept=KeptState(
            state, source="the job's state", token=state["rule"], rounds=state["rounds"], partial=True
        ),
        next_rounds=state["next_rounds"],
        helpers=state["helpers"],
        sums=frozenset(state["sums"]),
        rescale_grad=state["rescale_grad"],
        agreed=state["agreed"],
        script=state["script"],
    )

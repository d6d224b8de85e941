"""KVStores whose ranks train alone for some steps, and exchange what they have learnt less often.

`LocalSGD` averages the values of all ranks every few steps; `HFA` averages within sites, and less often
across them; `ESync` gives each rank as many steps as let all be ready at once; `DiLoCo` gives the average of
what ranks have learnt to an outer optimizer, fragment by fragment; `MixedSync` sums gradients within a site
and pushes them to owners, which wait for nobody. Each is what `gluon.Trainer` and `Module` take as `kvstore`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from netstorm import clock
from netstorm.compression.codec import Codec, Floats, GradientPlace, Rounds
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays import StagingBuffer, is_dense
from netstorm.frontends.mxnet.asynchronous import (
    AsyncEntry,
    AsynchronousKVStore,
    CollectedStates,
    Freshness,
    Number,
    PullTarget,
)
from netstorm.frontends.mxnet.checkpoint import from_tree
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.entries import AnyEntry, EncodedKey, Entry, GradientCompression, sum_rows
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.owner import Owner
from netstorm.frontends.mxnet.store import Given, NetStormKVStore
from netstorm.frontends.mxnet.updates import CalledUpdater
from netstorm.kvstore.calls import EncodedSum, Sites, SiteSums, TensorCalls, run_in_turn, set_memory
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import UNBOUNDED, Done, Operation
from netstorm.kvstore.process.elastic import StepPacer
from netstorm.kvstore.process.runtime import Runtime
from netstorm.training.averages import (
    Changes,
    divide_by_contributors,
    divide_parts,
    forget_the_past,
    in_all_parts,
)
from netstorm.training.outer import OuterSGD, merge
from netstorm.training.periods import Average, FragmentSchedule, Paced, Periodic, Periods, StepSchedule
from netstorm.training.sites import SiteLead, SiteTensor

__all__ = ["HFA", "DiLoCo", "ESync", "LocalSGD", "MixedSync", "OuterSGD"]


# One dense key whose value this rank updates alone, and averages now and then.

Memory: TypeAlias = npt.NDArray[Any]

Begin: TypeAlias = Callable[[Memory, Done], None]
"""Begins an average in the memory of the value, flat, and calls `Done` when it is there."""


def _nothing() -> None:
    """Stand in for what nobody has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueAverage:
    """An average that is due after a step."""

    over: Average
    """The ranks."""
    sites: Sites
    """Of the job."""
    rule: str
    """Of the schedule, the codec and the optimizer; ranks must agree."""
    hierarchical: bool
    """An average of all is formed within sites first, and crosses the WAN once a site."""
    is_newcomer: bool = False
    """This rank has joined an elastic job later: it is in no average of a site."""
    priority: int = 0
    """Larger goes first on every link."""
    codec: Codec | None = None
    """How changes travel; None: values do, as they are."""
    begins: Callable[[], None] = _nothing
    """Called when this rank's value is there, on a thread of the engine."""
    ends: Callable[[], None] = _nothing
    """Called when the average is there, on any thread."""


def check_averages(store: str, key: object, value: object) -> None:
    """Check that new keys have values that ranks of a site can sum.

    Args:
        store: the class, for the message.
        key: of the call.
        value: an array, or one for each key.

    Raises:
        UsageError: an array is sparse, or of whole numbers.
    """
    for given in value if isinstance(value, (list, tuple)) else [value]:
        array = cast("Any", given)
        if isinstance(array, mx.nd.NDArray) and (
            array.stype != "default" or not np.issubdtype(array.dtype, np.floating)
        ):
            raise UsageError(
                f"init of key {key!r} with a {array.stype} array of {np.dtype(array.dtype)}: {store} takes "
                "dense values of float16, float32 and float64"
            )


def _site_tensor(key: Key) -> SiteTensor:
    return SiteTensor(key.name, key.elements, key.dtype)


class LocalEntry(Entry):
    """A key's value on this rank. Its own rounds are averages, not sums of gradients."""

    __slots__ = ("_across", "_changes", "_gradient", "_knows_base", "_sums")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._gradient: StagingBuffer | None = None
        self._sums: SiteSums | None = None
        self._across: TensorCalls | None = None
        """Of the leaders' sums under a codec."""
        self._changes: Final = Changes()
        self._knows_base = False
        """All ranks have had the same value, which `Changes` remembers."""

    def step(self, values: Sequence[NDArray], rule: CalledUpdater) -> None:
        """Sum gradients over this rank's devices, and update the value with the sum."""
        if all(is_dense(value) for value in values):
            if self._gradient is None:
                self._gradient = StagingBuffer(self.key.spec.shape, self.key.dtype)
            self._gradient.sum_of(values, self.last)
            total = self._gradient.array
        else:
            total = sum_rows(values, self.key)
        rule.update(self.user_key, total, self._stored.array, round="", rank=self._runtime.rank)

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over what a checkpoint or the other ranks have; a value is one that all ranks get."""
        super().restore(value, residual, rounds)
        if value is not None and self._knows_base:
            self.remember()

    def remember(self) -> None:
        """Have changes count from the value as it is after all that is queued now: all ranks have it."""
        self._knows_base = True
        stored, changes = self._stored, self._changes

        def start(completion: Completion) -> None:
            changes.remember(np.frombuffer(stored.memory(), np.float32))
            completion.succeed()

        push_async(start, reads=(stored.array,), writes=(self.kept.array,), name="netstorm_remember")

    def average(self, due: DueAverage) -> None:
        """Queue the replacement of the value by an average."""
        sites, over_all = due.sites, due.over is Average.ALL
        if self.key.elements == 0:
            return
        across = due.hierarchical and self.elastic is None and len(sites.leaders) < sites.size
        if not over_all:
            if due.is_newcomer:
                return
            name = f"{self.key.name} under {due.rule}"
            operations = self._of_sites(sites).average_within(name, due.priority)
            if operations:
                self._queue(due, self._in_turn(operations), operations[0].round)
            return
        if self.elastic is None and sites.size == 1:
            return
        # Changes count from a value that all ranks have. Before the first such average there is none.
        leaders = len(sites.leaders) if across else sites.size
        encodes = due.codec is not None and self._knows_base and (leaders > 1 or self.elastic is not None)
        if across:
            begin, round = self._across_sites(due, due.codec if encodes else None)
        elif encodes:
            begin, round = self._encoded_average(due)
        else:
            begin, round = self._plain_average(due)
        self._knows_base = encodes
        self._queue(due, begin, round)
        if due.codec is not None and not encodes:
            self.remember()

    # ------------------------------------------------------------------------------------ ways to average

    def _plain_average(self, due: DueAverage) -> tuple[Begin, int]:
        """Return the average of values along the job's trees, and the number of its round."""
        operation = Operation(
            key=self.key,
            round=self.key.take_round(),
            source=None,
            destination=None,
            done=_ignore,
            priority=due.priority,
            rule=due.rule,
        )
        runtime = self._runtime

        def begin(memory: Memory, done: Done) -> None:
            def divide() -> None:
                divide_by_contributors(operation, memory)
                self.contributors = in_all_parts(operation.contributors)
                done(None)

            operation.source = operation.destination = memory
            operation.done = lambda error: runtime.computing.run(divide) if error is None else done(error)
            runtime.submit(operation)

        return begin, operation.round

    def _encoded_average(self, due: DueAverage) -> tuple[Begin, int]:
        """Return the average of changes along the job's trees, and the number of its first round."""
        assert due.codec is not None
        encoded = self._encoded_by(due.codec)
        total = encoded.next_sum(due.priority, due.rule)

        def begin(memory: Memory, done: Done) -> None:
            def rounds() -> Rounds:
                yield from self._averaging(memory, encoded, total)
                counted = [ranks for _, ranks in total.counted(len(memory))]
                self.contributors = in_all_parts(counted)
                if not any(ranks >> self._runtime.rank & 1 for ranks in counted):
                    forget_the_past(self.kept.state)

            total.begin(rounds(), done)

        return begin, total.number

    def _averaging(self, memory: Memory, encoded: EncodedKey, total: EncodedSum) -> Rounds:
        """Return the rounds that make values their average; what travels is their changes."""
        return self._changes.rounds(memory, total, lambda change: encoded.rounds(change, total, None))

    def _across_sites(self, due: DueAverage, codec: Codec | None) -> tuple[Begin, int]:
        """Return the average that is formed within sites first, and the number of its first round."""
        sites, runtime, changes = due.sites, self._runtime, self._changes
        sums, name = self._of_sites(sites), f"{self.key.name} under {due.rule}"
        if codec is None:
            operations = sums.across(name, due.priority)
            summed = self._in_turn(operations)

            def begin_plain(memory: Memory, done: Done) -> None:
                def divide() -> None:
                    with np.errstate(all="ignore"):
                        memory[:] /= memory.dtype.type(sites.size)
                    done(None)

                summed(
                    memory,
                    lambda error: runtime.computing.run(divide) if error is None else done(error),
                )

            return begin_plain, operations[0].round
        within, after = sums.within(name, due.priority), sums.from_leader(name, due.priority)
        total = self._leaders_sum(due, codec) if sites.is_leader else None
        gathered, given = self._in_turn(within), self._in_turn(after)

        def begin(memory: Memory, done: Done) -> None:
            def keep(error: Exception | None) -> None:
                if error is None and not sites.is_leader:
                    changes.remember(memory)
                done(error)

            def give(error: Exception | None) -> None:
                if error is not None:
                    done(error)
                else:
                    given(memory, keep)

            def add_up() -> None:
                if total is None:
                    given(memory, keep)
                else:
                    total.begin(self._leaders_rounds(memory, total, codec, sites), give)

            gathered(memory, lambda error: runtime.computing.run(add_up) if error is None else done(error))

        first = within[0].round if within else total.number if total is not None else 0
        return begin, first

    def _leaders_sum(self, due: DueAverage, codec: Codec) -> EncodedSum:
        """Return the next sum of sites' changes, among one rank of each."""
        runtime, key = self._runtime, self.key
        if self._across is None:
            name, leaders = f"{key.name}/leaders", due.sites.leaders
            self._across = TensorCalls(name, leaders, size=-1, register=self._register)
        return EncodedSum(
            self._across.keys_of(codec.fingerprint, key.spec.shape, codec),
            submit=runtime.submit,
            later=runtime.computing.run,
            fail=runtime.fail,
            priority=due.priority,
            rule=due.rule,
        )

    def _leaders_rounds(self, memory: Floats, total: EncodedSum, codec: Codec, sites: Sites) -> Rounds:
        place = GradientPlace(
            self.key.spec.shape, len(sites.leaders), self._runtime.rank, total.number, clock.monotonic
        )
        state = self.kept.state
        yield from self._changes.rounds(
            memory,
            total,
            lambda change: codec.rounds(change, state, place),
            weight=len(sites.local),
            count=sites.size,
        )

    # --------------------------------------------------------------------------------------------- helpers

    def _queue(self, due: DueAverage, begin: Begin, round: int) -> None:
        """Queue an average in the memory of the value."""
        stored, residual, dtype = self._stored, self.kept, self.key.dtype

        def start(completion: Completion) -> None:
            due.begins()

            def done(error: Exception | None) -> None:
                due.ends()
                completion.end(error)

            begin(np.frombuffer(stored.memory(), dtype), done)

        push_async(
            start,
            reads=(),
            writes=(stored.array, residual.array),
            name="netstorm_average",
            priority=due.priority,
            skipped=lambda: self._skip(stored.array, round),
        )

    def _in_turn(self, operations: Sequence[Operation]) -> Begin:
        """Return what runs operations of sites one after the other."""
        submit = self._runtime.submit

        def begin(memory: Memory, done: Done) -> None:
            set_memory(operations, memory)
            run_in_turn(operations, submit, done)

        return begin

    def _of_sites(self, sites: Sites) -> SiteSums:
        if self._sums is None:
            tensor, of_all = _site_tensor(self.key), self.elastic is None
            self._sums = SiteSums(*tensor, sites, register=self._register, of_all=of_all)
        return self._sums


_ignore: Final[Done] = lambda _: None  # noqa: E731 -- replaced before the operation is submitted


class DiLoCoEntry(LocalEntry):
    """A key with a *global* value, which has the same bits at all ranks, beside this rank's own one.

    Global values change at synchronisations alone, so they are what checkpoints and newcomers get.
    """

    __slots__ = ("_change", "_global", "fragment", "under_way", "velocity")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._global: Final = StagingBuffer(key.spec.shape, key.dtype)
        self._change: Final = StagingBuffer(key.spec.shape, key.dtype)
        """The outer gradient, then its average."""
        self.velocity: StagingBuffer | None = None
        """Of an outer optimizer with a momentum."""
        self.fragment = 0
        self.under_way = False
        """A sum has begun and has not been applied."""

    @property
    def value(self) -> NDArray:
        """The global value; not to be changed."""
        return self._global.array

    def initialise(self, value: NDArray | None) -> None:
        """Give all ranks the same value; see `Entry`."""
        super().initialise(value)
        self.remember()

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over what a checkpoint or the other ranks have; a value is a global one."""
        super().restore(value, residual, rounds)
        if value is not None:
            self.remember()

    def remember(self) -> None:
        """Make the value the global one: all ranks have it."""
        self._global.copy_from(self._stored.array)

    def load_global(self) -> None:
        """Make the global value this rank's own."""
        self._stored.copy_from(self._global.array)

    def begin_velocity(self, given: NDArray | None) -> None:
        """Have a momentum, which begins with zeros if none is given."""
        self.velocity = StagingBuffer(self.key.spec.shape, self.key.dtype)
        self.velocity.copy_from(
            mx.nd.zeros(self.key.spec.shape, dtype=self.key.dtype) if given is None else given
        )

    def begin_sum(self, due: DueAverage) -> None:
        """Queue the average of the outer gradient: global minus own value, as they are now."""
        begin, round = self._plain_average(due) if due.codec is None else self._encoded_average(due)
        stored, shared, change, dtype = self._stored, self._global, self._change, self.key.dtype
        self.under_way = True

        def start(completion: Completion) -> None:
            memory = np.frombuffer(change.memory(), dtype)
            with np.errstate(all="ignore"):
                np.subtract(_floats(shared), _floats(stored), out=memory)
            begin(memory, completion.end)

        push_async(
            start,
            reads=(stored.array, shared.array),
            writes=(change.array, self.kept.array),
            name="netstorm_average",
            priority=due.priority,
            skipped=lambda: self._skip(change.array, round),
        )

    def apply(self, outer: OuterSGD, alpha: float) -> None:
        """Queue the outer step with the average, if a sum is under way, and its merge into the own value."""
        if not self.under_way:
            return
        self.under_way = False
        stored, shared, change, velocity = self._stored, self._global, self._change, self.velocity
        computing = self._runtime.computing

        def start(completion: Completion) -> None:
            def step() -> None:
                with np.errstate(all="ignore"):
                    outer.step(
                        _floats(shared), _floats(change), None if velocity is None else _floats(velocity)
                    )
                    merge(_floats(stored), _floats(shared), alpha)
                completion.succeed()

            computing.run(step)

        written = (stored, shared) if velocity is None else (stored, shared, velocity)
        push_async(
            start,
            reads=(change.array,),
            writes=[buffer.array for buffer in written],
            name="netstorm_outer_step",
        )

    def _averaging(self, memory: Memory, encoded: EncodedKey, total: EncodedSum) -> Rounds:
        yield from encoded.rounds(memory, total, None)
        with np.errstate(all="ignore"):
            divide_parts(memory, total)


def _floats(buffer: StagingBuffer) -> npt.NDArray[np.floating[Any]]:
    return cast("npt.NDArray[np.floating[Any]]", np.frombuffer(buffer.memory(), buffer.dtype))


# What stores with local updates share: pushes update this rank's own values, which are averaged at times.

_STATE: Final = "averages of a store with local updates"
"""Under which name the number of averages travels to ranks that join later."""


@methods_raise_mxnet_errors
class LocalUpdatesKVStore(NetStormKVStore):
    """A store whose pushes update this rank's own values with its optimizer, as if it trained alone.

    `gluon.Trainer(..., kvstore=store)` and `Module.fit(kvstore=store)` work as with any store. A step is a
    push of every key; a push of a key that was pushed in this step begins the next one. Values are this
    rank's own between averages; a pull after an average gives the same bits at all ranks that it is over.

    In an elastic job an average is one over the ranks that are in it. A rank that joins later gets the values
    of an average of all, and the states of one rank's optimizer. Until it has caught up its values do not
    count, and each of its steps is followed by an average of all.
    """

    _entry_type = LocalEntry

    _optimizers_differ = True

    _hierarchical: ClassVar[bool] = False
    """An average of all crosses the WAN once a site. Otherwise it goes along the job's trees, as sums do."""

    def __init__(self) -> None:
        """Join the job, as `ElasticStore` does."""
        super().__init__()
        live = self._runtime.node.live
        members = live.first_members if live.is_elastic else self._runtime.node.members
        self._schedule: StepSchedule = Periodic("none", Periods(1))
        self._sites: Final = Sites.of(members, self.rank)
        self._pushed: Final[set[object]] = set()
        """Keys that were pushed in this step."""
        self._follows = Average.ALL
        """What follows the step."""
        self._has_attached = False

    @property
    def sites(self) -> Sites:
        """Which ranks are at which site; in an elastic job, of those that were there when this one came."""
        return self._sites

    @property
    def averages(self) -> int:
        """How many averages this rank has begun, of its site or of all; the same at all ranks that are in
        the same step.
        """
        return self._schedule.averages

    @property
    def steps(self) -> int:
        """How many steps this rank has taken; a rank that joins an elastic job later skips some."""
        return self._schedule.steps

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same values now: the last step was followed by an average of all."""
        return self._schedule.is_averaged

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`.

        Raises:
            UsageError: also of a key that is row-sparse or of whole numbers: it has no average.
        """
        check_averages(type(self).__name__, key, value)
        super().init(key, value)

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Update this rank's value with the sum of gradients over its devices; average it if that is due.

        Raises:
            UsageError: as of `NetStormKVStore.push`; or no optimizer has been set.
        """
        self._enter_step(key)
        super().push(key, value, priority)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out`."""
        if out is None:
            raise UsageError(
                "pushpull without out: values are updated here, so there is no sum to return; call "
                "gluon.Trainer with update_on_kvstore=True"
            )
        self._enter_step(key)
        super().pushpull(key, value, out, priority)

    def set_gradient_compression(self, compression_params: object) -> None:
        """Send averages of all ranks in fewer bytes from now on, by a codec (docs/guides/compression.md).

        What travels is each key's change since the last average of all. All ranks must call it, with the same
        values, between the same pushes. Averages within a site travel as they are.

        Args:
            compression_params: see `NetStormKVStore.set_gradient_compression`.

        Raises:
            UsageError: another type, or a bad parameter.
        """
        super().set_gradient_compression(compression_params)

    # ------------------------------------------------------------------------------------------ for the store

    def _prepare(self) -> None:
        super()._prepare()
        if self._elastic is not None and not self._has_attached:
            self._has_attached = True
            self._elastic.attach(_STATE, self._progress, self._go_on_from)

    def _progress(self) -> object:
        return {"averages": self._schedule.averages, "steps": self._schedule.steps}

    def _go_on_from(self, progress: Any) -> None:
        self._schedule.go_on_at(int(progress["averages"]), progress.get("steps"))
        self._pushed.clear()

    def _settled_entries(self) -> Sequence[AnyEntry]:
        return super()._settled_entries() if self.is_averaged else ()

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        super()._initialise(entry, initial)
        assert isinstance(entry, LocalEntry)
        compression, shape = self._compression, entry.key.spec.shape
        if compression is not None and compression.codec_of(entry.tensor_name, shape) is not None:
            entry.remember()

    def _enter_step(self, key: object) -> None:
        self._check()
        if self._rule is None:
            raise UsageError(
                f"push to {type(self).__name__} without an optimizer: this rank updates its own values; call "
                "set_optimizer first (gluon.Trainer and Module do, with update_on_kvstore)"
            )
        keys = set(key) if isinstance(key, (list, tuple)) else {key}
        if not self._pushed or not self._pushed.isdisjoint(keys):
            elastic = self._elastic
            if elastic is not None and self.is_averaged:
                elastic.begin_period(self._keys.entries, self._rule)
            self._pushed.clear()
            before = self.steps
            hurries = elastic is not None and not elastic.live.contributes
            self._follows = self._schedule.next_step(hurries=hurries)
            if elastic is not None:
                elastic.skip_samples(self.steps - before - 1)
        self._pushed.update(keys)

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        rule, compression = self._rule, self._compression
        assert rule is not None
        self._checkpoints.pushed()
        if compression is not None:
            for entry, _ in pushed:
                compression.check_key(entry.key, "push", entry.tensor_name)
        fingerprint = self._fingerprint(rule)
        for entry, values in pushed:
            assert isinstance(entry, LocalEntry)
            entry.step(values, rule)
            entry.pushed_in = self.steps
            self._exchange(entry, fingerprint, priority)

    def _fingerprint(self, rule: CalledUpdater) -> str:
        text = f"{self._schedule.fingerprint} {rule.fixed_fingerprint}"
        return text if self._compression is None else text + self._compression.fingerprint

    def _exchange(self, entry: LocalEntry, fingerprint: str, priority: int) -> None:
        """Queue what follows a key's step."""
        if self._follows is not Average.NONE:
            entry.average(self._due(entry, fingerprint, priority))

    def _due(self, entry: LocalEntry, fingerprint: str, priority: int) -> DueAverage:
        compression, elastic = self._compression, self._elastic
        return DueAverage(
            over=self._follows,
            sites=self._sites,
            rule=fingerprint,
            hierarchical=self._hierarchical,
            is_newcomer=elastic is not None and elastic.joined_with is not None,
            priority=priority,
            codec=None
            if compression is None
            else compression.codec_of(entry.tensor_name, entry.key.spec.shape),
        )

    def _check_checkpoint(self, what: str) -> None:
        self._check()
        if what == "save_checkpoint" and not self.is_averaged:
            raise UsageError(
                "save_checkpoint: ranks have values of their own between averages: save right after an "
                "average of all, when kv.is_averaged is true"
            )


# The stores: after how many steps values are averaged, and over which ranks.


@methods_raise_mxnet_errors
class LocalSGD(LocalUpdatesKVStore):
    """Replaces values by their average over all ranks every `sync_every` steps (arXiv 1805.09767)."""

    def __init__(self, sync_every: int) -> None:
        """Join the job; all ranks give the same `sync_every`.

        Raises:
            UsageError: it is below 1.
        """
        super().__init__()
        self._schedule = Periodic("LocalSGD", Periods.every(sync_every))


@methods_raise_mxnet_errors
class HFA(LocalUpdatesKVStore):
    """Hierarchical frequency aggregation: averages within sites often, and across them seldom (GeoMX).

    After every `k1` steps the average of the site, and at every `k2`-th of these times the average of all
    ranks. The first does not cross the WAN, the second once a site. Sites are those of NETSTORM_SITE, which
    `netstorm launch` sets from the network file, or hosts. In an elastic job the second goes along the job's
    trees, and a rank that has joined later takes no part in the first.

    Without an optimizer, scripts train and count to `k1` themselves, and push values divided by
    `num_workers`, as GeoMX's do.
    """

    _hierarchical = True

    def __init__(self, k1: int | None = None, k2: int | None = None) -> None:
        """Join the job; all ranks give the same periods.

        Args:
            k1: steps between averages of the site; None: MXNET_KVSTORE_HFA_K1.
            k2: of these, how many there are to one average of all; None: MXNET_KVSTORE_HFA_K2.

        Raises:
            UsageError: a period below 1.
        """
        super().__init__()
        settings = self._runtime.settings
        periods = Periods(settings.hfa_k1 if k1 is None else k1, settings.hfa_k2 if k2 is None else k2)
        self.periods: Final = periods
        """After how many steps the site's average comes, and after how many of these that of all."""
        self._schedule = Periodic("HFA", periods)

    def _enter_step(self, key: object) -> None:
        if self._rule is None:
            self._set_updater(self._take_value)
            self._schedule = Periodic("HFA of pushed values", Periods(1, self.periods.k2))
        super()._enter_step(key)

    def _take_value(self, key: object, pushed: NDArray, stored: NDArray) -> None:
        stored[:] = pushed * self.num_workers


@methods_raise_mxnet_errors
class ESync(LocalUpdatesKVStore):
    """Averages over all ranks, each of which has taken as many steps as fit into the time of the slowest.

    A rank that is four times slower takes one step while the others take four. The numbers follow what ranks
    measure; the scheduler's state server computes them (Li et al., IEEE TSC 2022).
    """

    def __init__(self, least_steps: int = 1, most_steps: int = 100) -> None:
        """Join the job; all ranks give the same numbers.

        Args:
            least_steps: steps of the slowest rank between averages.
            most_steps: bound for all ranks: after many steps alone values are far apart.

        Raises:
            UsageError: these are no bounds.
        """
        super().__init__()
        self._pacer: Final = StepPacer(self._runtime, least=least_steps, most=most_steps)
        name = f"ESync least={least_steps} most={most_steps}"
        self._paced: Final = Paced(name, self._pacer)
        is_alone = self._elastic is None and self.num_workers == 1
        self._schedule = Periodic(name, Periods(least_steps)) if is_alone else self._paced

    @property
    def round_steps(self) -> int:
        """The number of steps of the present round; waits until it is known."""
        return self._pacer.steps()

    def _due(self, entry: LocalEntry, fingerprint: str, priority: int) -> DueAverage:
        pacer, round = self._pacer, self._paced.averages - 1
        return dataclasses.replace(
            super()._due(entry, fingerprint, priority),
            begins=lambda: pacer.exchange_begins(round),
            ends=pacer.exchange_ends,
        )


# DiLoCo: an outer optimizer over what ranks have learnt alone (arXiv 2311.08105; streaming: 2501.18512).


@methods_raise_mxnet_errors
class DiLoCo(LocalUpdatesKVStore):
    """Averages what ranks have learnt in `sync_every` steps, and gives it to an outer optimizer.

    Each fragment is synchronised once in `sync_every` steps, at steps that are spread evenly. Its outer
    gradient is its global minus its local values. The average over all ranks is the gradient for a step of
    the outer optimizer on the global values, which have the same bits at all ranks. How outer gradients
    travel, `set_gradient_compression` says.

    A checkpoint has the global values, and so has a rank that joins an elastic job later.
    """

    _entry_type = DiLoCoEntry

    def __init__(
        self,
        model_fragments: Sequence[mx.gluon.Block | Sequence[str]],
        outer_optimizer: OuterSGD,
        sync_every: int,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        """Join the job; all ranks give the same.

        Args:
            model_fragments: for each a Block, or patterns of the names of its parameters, or of keys, such as
                ["*"]. They have no parameter in common, and together all that are trained.
            outer_optimizer: takes the outer steps.
            sync_every: steps between two synchronisations of a fragment.
            fragment_sync_delay: steps between the beginning of a sum and its application; training goes on
                meanwhile. Less than `sync_every`.
            fragment_update_alpha: from 0 to 1; local values become (1 - alpha) global + alpha local.

        Raises:
            UsageError: a value is not allowed; or the job is elastic, and `fragment_sync_delay` not 0.
        """
        super().__init__()
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise UsageError(f"fragment_update_alpha={fragment_update_alpha}: it must be from 0 to 1")
        if not model_fragments:
            raise UsageError("model_fragments is empty: give at least one Block, as [net]")
        if not isinstance(outer_optimizer, OuterSGD):
            raise UsageError(
                f"outer_optimizer is a {type(outer_optimizer).__name__}: expected one of "
                "netstorm.training.outer, such as OuterSGD(lr=0.7, momentum=0.9, nesterov=True)"
            )
        if self._elastic is not None and fragment_sync_delay:
            raise UsageError(
                f"fragment_sync_delay={fragment_sync_delay} in an elastic job (NETSTORM_ELASTIC): a rank "
                "that joins later cannot take over sums that are under way; use 0"
            )
        self._fragments: Final = [
            list(fragment.collect_params()) if isinstance(fragment, mx.gluon.Block) else list(fragment)
            for fragment in model_fragments
        ]
        self._plan: Final = FragmentSchedule(
            fragments=len(model_fragments), sync_every=sync_every, delay=fragment_sync_delay
        )
        self._outer: Final = outer_optimizer
        self._alpha: Final = fragment_update_alpha
        self._schedule = Periodic(f"DiLoCo alpha={fragment_update_alpha} {outer_optimizer}", self._plan)
        self._velocities: dict[int | str, Any] = {}
        """By keys that have not been initialised yet: of a checkpoint or the other ranks."""

    def sync(self) -> None:
        """Synchronise all keys now, as after the last step; all ranks must call it at the same step.

        Raises:
            UsageError: no optimizer has been set.
        """
        self._check()
        if self._rule is None:
            raise UsageError("sync: call set_optimizer first (gluon.Trainer and Module do)")
        fingerprint, entries = self._fingerprint(self._rule), self._all()
        for entry in entries:
            entry.apply(self._outer, self._alpha)
        for entry in entries:
            entry.begin_sum(self._due(entry, fingerprint, 0))
        for entry in entries:
            entry.apply(self._outer, self._alpha)

    def load_global_parameters(self) -> None:
        """Make the local values the global ones, which are the same at all ranks, as to save a model; pull
        them then. What this rank has learnt since its last synchronisation is lost.
        """
        self._check()
        for entry in self._all():
            entry.load_global()

    def _exchange(self, entry: LocalEntry, fingerprint: str, priority: int) -> None:
        assert isinstance(entry, DiLoCoEntry)
        if entry.fragment in self._plan.begin_at(self.steps):
            entry.begin_sum(self._due(entry, fingerprint, priority))
        if entry.fragment in self._plan.apply_at(self.steps):
            entry.apply(self._outer, self._alpha)

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        assert isinstance(entry, DiLoCoEntry)
        name = entry.tensor_name
        having = [
            number
            for number, names in enumerate(self._fragments)
            if any(fnmatchcase(name, pattern) for pattern in names)
        ]
        if len(having) != 1:
            raise UsageError(
                f"key {entry.user_key!r} ({name}) is in {len(having)} of model_fragments: expected one, or "
                "ranks would drift apart in it"
            )
        (entry.fragment,) = having
        super()._initialise(entry, initial)
        if self._outer.momentum:
            entry.begin_velocity(self._velocities.pop(entry.user_key, None))

    def _progress(self) -> object:
        velocities = {
            entry.user_key: entry.velocity.array for entry in self._all() if entry.velocity is not None
        }
        return {"averages": self.averages, "steps": self.steps, "velocities": velocities}

    def _go_on_from(self, progress: Any) -> None:
        super()._go_on_from(progress)
        self._velocities = {key: from_tree(array) for key, array in progress["velocities"].items()}
        for entry in self._all():
            if entry.user_key in self._velocities:
                entry.begin_velocity(self._velocities.pop(entry.user_key))

    def _check_checkpoint(self, what: str) -> None:
        self._check()
        if what == "save_checkpoint" and any(entry.under_way for entry in self._all()):
            raise UsageError(
                "save_checkpoint: sums of outer gradients are under way: save between two of them, or call "
                "sync() first, at all ranks"
            )

    def _all(self) -> list[DiLoCoEntry]:
        entries = self._keys.entries()
        return [entry for entry in entries if isinstance(entry, DiLoCoEntry)]


# MixedSync: synchronous within a site, asynchronous between sites (GeoMX).


class _MixedEntry(AsyncEntry):
    """A dense key whose gradients are summed within the site before one rank, the leader, pushes them.

    Sums and pulls of the site are made one after the other. Which rank leads may depend on the one before, so
    pushes and pulls take their numbers when they are made.
    """

    __slots__ = ("_lead", "_turn")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._turn: Final = StagingBuffer((1,), np.uint8)
        """What the ranks of the site do together writes it."""
        self._lead: SiteLead | None = None

    @property
    def lead(self) -> SiteLead:
        """Who pushes and pulls."""
        assert self._lead is not None
        return self._lead

    def join_site(self, sites: Sites) -> None:
        """Begin; called once, before the key is used."""
        runtime, key = self._runtime, self.key
        elastic = runtime.node.live.is_elastic
        self._lead = SiteLead(
            [_site_tensor(key)], sites, register=self._register, submit=runtime.submit, elastic=elastic
        )

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: GradientCompression | None = None,
    ) -> None:
        """Sum `values` over devices and the site, and have its leader push the sum."""
        if not all(is_dense(value) for value in values):
            raise UsageError(f"push of key {self.user_key!r}: MixedSync sums dense gradients within a site")
        super().push_to_owners(values, owner, clock=clock, priority=priority, compression=compression)

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Have the site's leader pull the newest value and give it to the others; copy it to `outs`."""
        stored, calls, name = self._stored, self.calls, self.key.name

        def begin(done: Done) -> None:
            values = self._flat(stored)

            def pull(pulled: Done) -> None:
                calls.pull_now(PullTarget(values), owner, freshness, pulled)

            self.lead.share([values], name, freshness.priority, pull, done)

        arrays = (stored.array, self._turn.array)
        calls.queue(begin, arrays, "netstorm_pull", freshness.priority, owed=f"a pull of key {name!r}")
        self.pull(outs)

    def wait_for_numbers(self) -> None:
        """Wait until all pushes have their numbers."""
        self._turn.array.wait_to_read()

    def _number_of(self, gradient: StagingBuffer, owner: Owner, priority: int) -> Number:
        """Queue the sum of the site's gradients; return what has the number of the push if this rank leads.

        A rank that has just begun to lead pulls first: owners correct late gradients by what has changed
        since a rank's last pull, and know nothing of this one.
        """
        calls, key, taken = self.calls, self.key, list[int]()

        def begin(done: Done) -> None:
            lead = self.lead
            led = lead.leads

            def take(error: Exception | None) -> None:
                if error is None and lead.leads:
                    taken.append(calls.pushes.take_push())
                done(error)

            def summed(error: Exception | None) -> None:
                if error is None and lead.leads and not led:
                    dropped = PullTarget(np.empty(key.elements, key.dtype))
                    calls.pull_now(dropped, owner, Freshness(None, counted=False, priority=priority), take)
                else:
                    take(error)

            lead.sum([self._flat(gradient)], f"gradients of {key.name}", priority, summed)

        arrays = (gradient.array, self._turn.array)
        calls.queue(begin, arrays, "netstorm_site", priority, owed=f"a sum of key {key.name!r}")
        return lambda: taken[0] if taken else None


@methods_raise_mxnet_errors
class MixedSync(AsynchronousKVStore):
    """An asynchronous store of sites: their ranks stay in step, and no site waits for another one.

    A push sums the gradients of a site, and its lowest rank pushes the sum to the owners, which apply it at
    once. A pull gives all ranks of the site the value that this rank gets. The ranks of a site push and pull
    the same keys in the same order. Sites are those of NETSTORM_SITE, or hosts.

    In an elastic job a site goes on without ranks that have left; if its lowest rank has, the next one pushes
    and pulls, and a push under way may be lost with the former. A rank that joins later is a site of its own.

    Where NETSTORM_STALENESS bounds how far sites may be apart, all ranks call `clock` after each step.
    """

    _entry_type = _MixedEntry

    _owners_count_pushes = False
    """Of most ranks there are none: clocks are those that scripts count."""

    def __init__(self) -> None:
        """Join the job, as `NetStormKVStore` does.

        Raises:
            UsageError: NETSTORM_STALENESS is 0; or an elastic job has a store already in this process.
        """
        super().__init__()
        if self._staleness == 0:
            raise UsageError(
                "MixedSync with NETSTORM_STALENESS=0, which keeps all ranks in step: use dist_sync_netstorm"
            )
        live = self._runtime.node.live
        members = live.first_members if self._is_elastic else self._runtime.node.members
        sites = Sites.of(members, self.rank)
        self._sites: Final = sites.without_others() if self._newcomer.waits else sites

    @property
    def sites(self) -> Sites:
        """Which ranks are at which site. In an elastic job those that have begun it, whether they are still
        there or not; on a rank that has joined later, this one alone.
        """
        return self._sites

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's site; in an elastic job those that are left of it, as results say that
        have come so far.
        """
        left = set(self._sites.local)
        for entry in self._all():
            assert isinstance(entry, _MixedEntry)
            left.intersection_update(entry.lead.ranks)
        return tuple(sorted(left))

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`.

        Raises:
            UsageError: also of a key that is row-sparse or of whole numbers.
        """
        check_averages("MixedSync", key, value)
        super().init(key, value)

    def _collect_states(self, owner: Owner) -> CollectedStates:
        for entry in self._all():
            assert isinstance(entry, _MixedEntry)
            entry.wait_for_numbers()
        return super()._collect_states(owner)

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        if self._staleness != UNBOUNDED and self._clock == 0:
            self._check_first_clock(pushed)
        super()._push_and_update(pushed, priority)

    def _check_first_clock(self, pushed: Given) -> None:
        for entry, _ in pushed:
            assert isinstance(entry, _MixedEntry)
            if entry.calls.called:
                raise UsageError(
                    f"push of key {entry.user_key!r} for the second time, and no clock() before, under "
                    f"NETSTORM_STALENESS={self._staleness}: only one rank of a site pushes, so the store "
                    "cannot tell steps by pushes: call clock() after each step, on all ranks"
                )

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        assert isinstance(entry, _MixedEntry)
        entry.join_site(self._sites)
        super()._initialise(entry, initial)

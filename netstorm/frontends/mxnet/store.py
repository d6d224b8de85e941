"""The KVStore that MXNet's users see: `mx.kv.create('dist_sync_netstorm')`.

Every method queues operations on MXNet's engine and returns. A push is a copy of the gradient into a staging
buffer, the network operation on that buffer, and the updater behind it. A pull is a copy of the stored value.
The engine keeps the order, so keys and rounds overlap as far as the script's own data flow allows.

Staging buffers make this safe. An array of the user's may be in oneDNN's blocked layout, may share its
variable with another one, may be on a GPU, and belongs to the user again as soon as it has been copied. None
of that reaches the network.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from netstorm.checkpoint.jobs import SaveOptions, Saving
from netstorm.errors import Closed, NodeLost, SchedulerLost, UsageError
from netstorm.frontends.mxnet.arrays import (
    ArrayKind,
    Group,
    check_dense,
    check_fits,
    grouped,
    kind_of,
    paired_with_row_ids,
)
from netstorm.frontends.mxnet.checkpoint import (
    LoadedCheckpoint,
    StoreCheckpoints,
    check_trainer,
)
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic import ElasticJob, ElasticSampler, Get, Set, trainer_state
from netstorm.frontends.mxnet.engine import LIBRARY, NDArray, check_call
from netstorm.frontends.mxnet.entries import (
    AnyEntry,
    Entry,
    GradientCompression,
    RowEntry,
    check_rows,
    compression_of,
)
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.updates import CalledUpdater, Updater
from netstorm.kvstore.forms import Key
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.runtime import (
    Runtime,
    after_close,
    before_finish,
    describe_compression,
    runtime_of_this_process,
)
from netstorm.kvstore.process.step_report import StepReport
from netstorm.protocol.codecs import ROW_SPARSE
from netstorm.protocol.frames import ranks_in
from netstorm.pslite.system import SHORT_CALL, ShortCall

__all__ = ["Given", "KeyTable", "NetStormKVStore"]


# Commands and questions for MXNet's servers, in a job that has no servers.

_log = logging.getLogger(__name__)

# mxnet.kvstore.kvstore._get_kvstore_server_command_type
_CONTROLLER: Final = 0
_NOTHING_TO_DO: Final = {1: "kSetMultiPrecision", 2: "kStopServer", 3: "kSyncMode"}
_METHODS: Final = {4: "set_gradient_compression(…)", 5: 'mx.profiler.set_config(…, profile_process="server")'}

_SCHEDULER_GROUP: Final = 1
_NODE_GROUPS: Final = 6
"""ps-lite's groups of servers (2) and workers (4). Every node is in both."""


# `mx.profiler` with `profile_process="server"` in a job that has no servers.
#
# The calls profile the process that makes them. The file's name begins with the rank, as those of MXNet's
# servers do: `rank0_profile.json`. MXNet has one profiler in each process. So if a script configures both
# "worker" and "server", everything is in one file, the one that was named last.

_DEFAULT_FILE: Final = "profile.json"  # MXNet's


class _Profiler:
    rank: int | None = None
    """None: this process has no store of ours, and MXNet's functions do what they always do."""
    written = ""
    """The `profile_process` whose dump has ended the profile; there is nothing left for the other one."""


def _redirected(original: Callable[..., object]) -> Callable[..., object]:
    parameters, name = inspect.signature(original), original.__name__

    @functools.wraps(original)
    def call(*arguments: object, **named: object) -> object:
        if _Profiler.rank is None:
            return original(*arguments, **named)
        given = parameters.bind(*arguments, **named)
        given.apply_defaults()
        options = given.arguments
        if name == "set_config":
            options = options["kwargs"]
        process = options.pop("profile_process", "worker")
        if name == "dump":
            if _Profiler.written not in ("", process):
                return None
            _Profiler.written = process if options["finished"] else ""
        elif name == "set_state":
            _Profiler.written = ""
        elif name == "set_config" and process == "server":
            path = Path(options.get("filename", _DEFAULT_FILE))
            options["filename"] = str(path.with_name(f"rank{_Profiler.rank}_{path.name}"))
        return original(**options)

    return call


for _name in ("set_config", "set_state", "dump", "pause", "resume"):
    setattr(mx.profiler, _name, _redirected(getattr(mx.profiler, _name)))


# The part of a store that has no keys: ranks, barriers, statistics, and the end of the process.

_ERRORS_AT_EXIT: Final = 100
"""Most independent errors of MXNet operations that are cleared at exit; each `waitall` raises one."""


@methods_raise_mxnet_errors
class JobMember(mx.kvstore.KVStore):
    """A KVStore as one of the nodes of a job.

    It is a subclass of MXNet's own because `gluon.Trainer` insists on one for sparse gradients.
    """

    def __init__(self) -> None:
        """Join the job, if this process has not yet; waits until all nodes are here.

        Raises:
            netstorm.errors.NetStormError: the job does not come together; the message says why and who is
                missing.
        """
        handle = mx.base.KVStoreHandle()  # MXNet's profiler and destructor need a real one
        check_call(LIBRARY.MXKVStoreCreate(b"local", ctypes.byref(handle)))
        super().__init__(handle)
        self._runtime: Final[Runtime] = runtime_of_this_process(framework="MXNet")
        _Profiler.rank = self.rank

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._runtime.rank

    @property
    def num_workers(self) -> int:
        """With how many nodes the job begins (DMLC_NUM_WORKER).

        It never changes, since scripts divide by it, and Gluon's Trainer takes another divisor for another
        batch size. In an elastic job sums are scaled to it (NETSTORM_RESCALE);
        `live_ranks` says who is in.
        """
        return self._runtime.settings.num_workers

    @property
    def num_all_workers(self) -> int:
        """`num_workers`, as GeoMX's scripts ask for the nodes of all data centres."""
        return self.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can run the optimizer: it can.

        Raises:
            UsageError: another capability; a ValueError, as MXNet's own error is.
        """
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return True
        raise UsageError(f"Unknown capability: {capability}")

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far: bytes, seconds on the network, counters (see `Runtime`)."""
        return self._runtime.statistics()

    def step_report(self) -> StepReport:
        """Return what this rank has waited for since the last call; the first call begins to watch."""
        return self._runtime.step_report()

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """Return how many nodes of a group are dead.

        Groups have ps-lite's numbers: 1 is the scheduler, 2 and 4 are nodes, 7 is all. PS_HEARTBEAT_TIMEOUT
        says when a node counts as dead; `timeout` is ignored. MXNet has this in its C++ interface only.

        Raises:
            UsageError: the number is not a group's; single nodes have ranks here.
        """
        if not 0 < node_id <= _SCHEDULER_GROUP + _NODE_GROUPS:
            raise UsageError(
                f"get_num_dead_node({node_id}): 1 is the scheduler, 2 are servers and 4 workers (every node "
                "is both), 7 are all"
            )
        failure = self._runtime.failure
        nodes = bool(node_id & _NODE_GROUPS) and isinstance(failure, NodeLost)
        return int(nodes or (bool(node_id & _SCHEDULER_GROUP) and isinstance(failure, SchedulerLost)))

    def _barrier(self) -> None:
        """Wait until all ranks are here."""
        self._runtime.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Accept a command for servers, if there is nothing to do for it here; else say what does it."""
        if head == _CONTROLLER:
            raise UsageError(
                "there are no servers to send a pickled optimizer to: call set_optimizer on every rank"
            )
        if head in _METHODS:
            raise UsageError(f"command {head}: there are no servers; call {_METHODS[head]} on every rank")
        if head not in _NOTHING_TO_DO:
            _log.warning("unknown command for servers ignored (%d, %.50s): there are no servers", head, body)


def _clear_errors() -> None:
    """Clear the errors that MXNet would raise, with a traceback, in its own exit function.

    They have been reported.
    """
    for _ in range(_ERRORS_AT_EXIT):
        try:
            mx.nd.waitall()
        except mx.base.MXNetError:
            continue
        return


before_finish(mx.nd.waitall)
after_close(_clear_errors)


# The keys of one store: which there are, and whether the keys and arrays of a call fit them.

Given: TypeAlias = list[tuple[AnyEntry, list[NDArray]]]
"""The entries of a call's keys, with the arrays that were given for each."""


class KeyTable:
    """A store's entries, by the user's key."""

    def __init__(self, runtime: Runtime, namespace: int) -> None:
        """Begin with no keys; `namespace` is the store's."""
        self._runtime: Final = runtime
        self._namespace: Final = namespace
        self._entries: Final[dict[int | str, AnyEntry]] = {}

    def entries(self) -> list[AnyEntry]:
        """Return all entries, in the order in which their keys were initialised."""
        return list(self._entries.values())

    def add(self, entry: AnyEntry) -> None:
        """Add a key's entry; `check_new` has accepted the key."""
        self._entries[entry.user_key] = entry

    def find(self, groups: list[Group], what: str) -> Given:
        """Return the entries of keys, after checking the arrays.

        Args:
            groups: the keys and arrays of a call.
            what: the method, for error messages.

        Raises:
            UsageError: a key has not been initialised, or an array does not fit its key.
        """
        given: Given = []
        for user_key, arrays in groups:
            entry = self._entries.get(user_key)
            if entry is None:
                raise self._unknown(user_key, what)
            if not entry.last.have(arrays):
                check_fits(arrays, entry.key, what)
            given.append((entry, arrays))
        return given

    def check_new(
        self, user_key: int | str, values: list[NDArray], compression: GradientCompression | None, name: str
    ) -> ArrayKind:
        """Return the kind of a new key's initial value, after checking key and value.

        Raises:
            UsageError: the key exists, is of another type than the others, or cannot have this value.
        """
        if user_key in self._entries:
            raise UsageError(
                f"key {user_key!r} has been initialised before; each key is initialised once a store"
            )
        self._check_type(user_key, "init")
        if len(values) > 1:
            raise UsageError(f"init of key {user_key!r} with {len(values)} arrays; give it one array")
        kind = kind_of(values[0])
        key = Key(self._namespace, str(user_key), kind.shape, kind.dtype.name)
        check_fits(values, key, "init")
        if compression is not None:
            compression.check_key(key, "init", name)
        if not kind.dense:
            check_rows(self._runtime, key.name, kind.shape)
        return kind

    def _unknown(self, user_key: int | str, what: str) -> UsageError:
        self._check_type(user_key, what)
        known = ", ".join(map(str, list(self._entries)[:5])) or "none"
        return UsageError(
            f"{what} of key {user_key!r}, which has not been initialised; init it first (keys: {known})"
        )

    def _check_type(self, user_key: int | str, what: str) -> None:
        """Check that a key is of the type of the others: to MXNet's users 3 and "3" are the same."""
        other = next(
            (known for known in self._entries if isinstance(known, str) != isinstance(user_key, str)), None
        )
        if other is not None:
            raise UsageError(
                f"{what} of key {user_key!r}: this store has {type(other).__name__} keys, such as {other!r}; "
                "keys must be all int or all str"
            )


class ConfiguresFirst:
    """What `is_master_worker` is here: true until the store has a key, on every rank.

    GeoMX's scripts ask once, before anything else. If it is true they configure the servers, initialise the
    keys and end; if not they train. Here every rank has to do both.
    """

    def __init__(self, keys: KeyTable) -> None:
        self._keys: Final = keys

    def __bool__(self) -> bool:
        """Return whether there is no key yet."""
        return not self._keys.entries()


# The part of a store that has keys and an optimizer, and saves both in checkpoints.


@methods_raise_mxnet_errors
class CheckpointedStore(JobMember):
    """A store as checkpoints see it."""

    _is_replicated: ClassVar[bool] = True
    """Every rank has all values and states."""

    _optimizers_differ: ClassVar[bool] = False
    """Each rank's optimizer has states of its own, which a checkpoint keeps for that rank."""

    def __init__(self) -> None:
        """Join the job, as `JobMember` does, and open a store without keys."""
        super().__init__()
        self._namespace: Final = self._runtime.open_namespace()
        self._keys: Final = KeyTable(self._runtime, self._namespace)
        self._rule: CalledUpdater | None = None
        self._checkpoints: Final = StoreCheckpoints(
            self._runtime, self._namespace, optimizers_differ=self._optimizers_differ
        )

    @property
    def is_master_worker(self) -> ConfiguresFirst:
        """Whether this rank is to configure the job, which GeoMX's scripts ask: true until it has a key."""
        return ConfiguresFirst(self._keys)

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        extra: object = None,
        shares: bool = True,
        keep: int | None = None,
        timeout_s: float = 600.0,
    ) -> Saving:
        """Begin to write all values, optimizer states and counts, and return while a thread writes them.

        Every rank calls this, after the same pushes. It waits for those, copies its share, about 1/N of the
        bytes, and sends a small message. The checkpoint, `path/step-000123/`, is complete when its index is
        there, which rank 0 writes last. A second call waits until the first checkpoint is written, or has
        failed.

        Args:
            path: folder of the job's checkpoints, on a file system that all ranks share.
            step: names the checkpoint; one of the same step is replaced. None: the next one in the folder.
            extra: dictionaries, lists, numbers, texts and arrays of the script's, the same at all ranks.
            shares: whether each rank writes its share. If not, rank 0 writes everything, and needs no file
                system that the others share; the others may call this too, and do nothing.
            keep: number of complete checkpoints to keep; older ones are removed after the new one is
                complete. None: all.
            timeout_s: longest wait of the thread for the shares of the other ranks.

        Returns:
            The saving under way; its `wait()` returns when the checkpoint is complete, or raises what has
            gone wrong.

        Raises:
            UsageError: there are no keys yet, or something that a checkpoint cannot hold.
            Disagreement: ranks save different things.
        """
        self._check_checkpoint("save_checkpoint")
        options = SaveOptions(
            step=step, shares=shares, keep=keep, timeout_s=timeout_s, compares_tensors=False
        )
        return self._save(path, options, extra)

    def load_checkpoint(
        self,
        path: str | Path,
        *,
        trainer: object = None,
        step: int | None = None,
        states: bool = True,
        broadcast: bool = False,
        missing_ok: bool = False,
    ) -> LoadedCheckpoint | None:
        """Take over a checkpoint, in a job of however many nodes; every rank calls this.

        Keys that are initialised later begin with its values, and an optimizer that is set later with its
        states. What the store has already is replaced; pull it then. All ranks get the same checkpoint, the
        newest that is complete. What was only written in part is skipped, with a warning. Every byte is
        checked.

        Args:
            path: folder of the job's checkpoints.
            trainer: a `gluon.Trainer` with this store: its parameters get the values at once. Module needs
                none: load before `init_optimizer`.
            step: which checkpoint; None: the newest.
            states: whether the optimizer gets its states, counts and rates; if not, only values are loaded.
            broadcast: only rank 0 reads, and sends everything to the others: for ranks without a file system
                in common.
            missing_ok: return None if the folder has no checkpoint, instead of an error. A rank that has
                joined an elastic job later gets None in any case: it has the state of the others.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit this store; names the
                file, and says what to do.
            Disagreement: ranks see different checkpoints under the same path.
        """
        self._check_checkpoint("load_checkpoint")
        if self._skips_checkpoint():
            return None
        if trainer is not None:
            check_trainer(trainer, self)
        loaded = self._checkpoints.load(
            path,
            self._keys.entries(),
            self._rule,
            step=step,
            states=states,
            broadcast=broadcast,
            missing_ok=missing_ok,
        )
        if loaded is not None and trainer is not None:
            self._checkpoints.fill(trainer)
        if loaded is not None and loaded.progress is not None:
            self._go_on_from(loaded.progress)
        return loaded

    def _save(self, path: str | Path, options: SaveOptions, extra: object) -> Saving:
        rule = self._collected_rule()  # behind it every value is here
        return self._checkpoints.save(
            path, self._keys.entries(), rule, extra, options, progress=self._progress()
        )

    def _collected_rule(self) -> CalledUpdater | None:
        """Return the rule with the states to save; every value is here then, too."""
        return self._rule

    def _progress(self) -> object:
        """Return what a checkpoint is to say of how far this store is, in plain values; None: nothing."""
        return None

    def _go_on_from(self, progress: Any) -> None:
        """Go on from where a store of this kind was."""

    def _skips_checkpoint(self) -> bool:
        """Return whether there is nothing to load, since this rank has the state of the others."""
        return False

    def _check(self) -> None:
        """Raise the error that has made the store useless, if there is one.

        If an operation of the script's own has failed, raise that failure, which is the cause of the others.
        """
        try:
            self._runtime.check()
        except Closed:
            for entry in self._keys.entries():
                if entry.skipped is not None:
                    entry.skipped.wait_to_read()
            raise

    def _check_checkpoint(self, what: str) -> None:
        """Raise an error if this store can save or load no checkpoint now; `what` is the method."""
        self._check()


# The part of a store that belongs to an elastic job: who is in, and what a rank gets that joins later.


@methods_raise_mxnet_errors
class ElasticStore(CheckpointedStore):
    """A store as elastic jobs see it. In other jobs its methods say what is known from the start."""

    def __init__(self) -> None:
        """Join the job, as `JobMember` does.

        Raises:
            UsageError: an elastic job has a store already in this process.
        """
        super().__init__()
        self._elastic: ElasticJob | None = None
        if self._is_replicated and self._runtime.node.live.is_elastic:
            if self._namespace > 0:
                raise UsageError(
                    "an elastic job (NETSTORM_ELASTIC) has one store a process, whose state a rank gets that "
                    "joins later: use one store for all keys"
                )
            self._elastic = ElasticJob(self._runtime, self._checkpoints.ranks.keys)
            before_finish(self._offer_last_state)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job now, with those that have just joined and do not contribute yet."""
        return tuple(range(self.num_workers)) if self._elastic is None else self._elastic.live.ranks

    def contributors(self, key: int | str) -> tuple[int, ...]:
        """Return the ranks whose values are in a key's last complete round; none before the first.

        A round in which a rank has left may have that rank's values in some parts and not in others. It is
        named only if they are in all.

        Raises:
            UsageError: the key has not been initialised.
        """
        self._check()
        ((entry, _),) = self._keys.find([(key, [])], "contributors")
        return self.live_ranks if self._elastic is None else tuple(ranks_in(entry.contributors))

    def attach_state(self, name: str, get: Get, set: Set) -> None:  # noqa: A002 -- a pair of get and set
        """Have a state of the script's travel to ranks that join later, such as its place in the epoch.

        Every rank calls this, before its first push. On a rank that has joined later, `set` is called before
        this returns, with what `get` has returned at the others before the step that this rank begins with.

        Args:
            name: of the state, the same at all ranks.
            get: returns dictionaries, lists, numbers, texts and dense arrays; called between steps, within
                a push. Ranks that return the same serve a newcomer together; otherwise one does.
            set: takes what `get` returned; arrays are new ones on the host.

        Raises:
            UsageError: the name is attached already.
            WaitTimeout: this rank has joined later, and the others have offered nothing for too long.
        """
        self._check()
        if self._elastic is not None:
            self._prepare()
            self._elastic.attach(name, get, set)

    def attach_trainer(self, trainer: object) -> None:
        """Have a `gluon.Trainer`'s weights travel to ranks that join later; call it before the first step.

        With `update_on_kvstore=False` the weights and the states of the optimizer are the script's. Otherwise
        they are the store's, and a rank that has joined later has the weights at once instead of after its
        first step.

        Raises:
            UsageError: no Trainer, or one with another store.
            WaitTimeout: as in `attach_state`.
        """
        self._check()
        check_trainer(trainer, self, "attach_trainer")
        assert isinstance(trainer, mx.gluon.Trainer)
        if self._elastic is None:
            return
        self._prepare()
        if trainer._kvstore_params["update_on_kvstore"] is False:  # noqa: SLF001
            self._elastic.kept_by_script.update(trainer._param2idx.values())  # noqa: SLF001
            self._elastic.attach("the weights of a Trainer", *trainer_state(trainer))
        elif self._elastic.joined_with is not None:
            self._checkpoints.fill(trainer)

    def attach_sampler(self, sampler: object) -> None:
        """Have an `ElasticSampler` share its samples among the ranks of each step, and its place travel to
        ranks that join later; call it before the first step.

        Raises:
            UsageError: no `ElasticSampler`; or ranks are in different steps.
            WaitTimeout: as in `attach_state`.
        """
        self._check()
        if not isinstance(sampler, ElasticSampler):
            raise UsageError(f"attach_sampler: a {type(sampler).__name__}, not an ElasticSampler")
        if self._elastic is None:
            self.attach_state("the place of a sampler", sampler.place, sampler.go_on_at)  # it may refuse
            sampler.set_ranks(self.rank, self.live_ranks)
            return
        self._prepare()
        self._elastic.attach_sampler(sampler, self._settled_entries)

    def _barrier(self) -> None:
        """Wait until all ranks are here. A rank that has joined later skips those before its first push."""
        self._prepare()
        if self._elastic is None or not self._elastic.passes_barrier():
            super()._barrier()

    # ------------------------------------------------------------------------------------------ for the store

    def _prepare(self) -> None:
        """Fetch the job's state, if this rank has joined later and does not have it."""
        elastic = self._elastic
        if elastic is None or elastic.joined_with is not None:
            return
        state = elastic.prepare()
        if state is not None:
            self._checkpoints.take_over(state.kept, state.helpers)

    def _skips_checkpoint(self) -> bool:
        self._prepare()
        skips = self._elastic is not None and self._elastic.has_just_joined
        if skips:
            _log.warning("load_checkpoint: nothing is loaded, since this rank has the state of the others")
        return skips

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        """Give a new key the value that the job has, or begin the round in which all get the same one."""
        elastic = self._elastic
        if elastic is None:
            entry.initialise(initial if self.rank == 0 else None)
        else:
            entry.elastic = elastic.results
            if elastic.begin_key(entry):
                entry.restore(initial, None, 0)
            else:
                entry.initialise(initial)
        self._checkpoints.initialised(entry)

    def _initial_value(self, user_key: int | str, given: NDArray) -> NDArray:
        """Return the value that a new key begins with: the job's or a checkpoint's, or what was given."""
        if self._elastic is not None and user_key in self._elastic.kept_by_script:
            return given
        return self._checkpoints.initial_value(user_key, given)

    def _settled_entries(self) -> Sequence[AnyEntry]:
        """Return the keys by whose last results ranks agree on who is there; none: it stays as it was."""
        return self._keys.entries()

    def _optimizer_set(self, rule: CalledUpdater) -> None:
        if self._elastic is not None:
            self._elastic.optimizer_set(rule)

    def _check_weights(self, key: object) -> None:
        """Raise `UsageError` if a pull of keys that were just initialised would not give weights."""
        if self._elastic is not None:
            for user_key in key if isinstance(key, (list, tuple)) else [key]:
                self._elastic.check_pull_of_new(user_key)

    def _offer_last_state(self) -> None:
        if self._elastic is not None:
            self._elastic.finish(self._keys.entries(), self._rule)


@methods_raise_mxnet_errors
class NetStormKVStore(ElasticStore):
    """A distributed, synchronous key-value store of general nodes.

    Every rank keeps a replica of every value and runs the optimizer on it, so all ranks hold the same bytes.
    Every error of `netstorm.errors` that a method raises is also an `mx.MXNetError`. A script may catch a
    misuse (`UsageError`) and go on with the store.
    """

    _entry_type: ClassVar[type[Entry]] = Entry

    _row_entry_type: ClassVar[type[RowEntry]] = RowEntry

    def __init__(self) -> None:
        """Join the job; see `JobMember`."""
        super().__init__()
        self._compression: GradientCompression | None = None
        self._loss = loss_terms(self._runtime.settings)

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "_sync" in."""
        return "dist_sync_netstorm"

    # ------------------------------------------------------------------------------------------- keys and
    # values

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks.

        Args:
            key: int, str, or a list of them; either int or str throughout a store.
            value: one NDArray for each key; all ranks give the same shape and type.

        Raises:
            UsageError: a key that exists already, or an array that cannot be one's value. No key has been
                initialised then.
        """
        self._check()
        new = [
            (
                user_key,
                values[0],
                self._keys.check_new(user_key, values, self._compression, self._tensor_name(user_key)),
            )
            for user_key, values in grouped(key, value, "init")
        ]
        self._prepare()
        for user_key, given, kind in new:
            initial = self._initial_value(user_key, given)
            entry_type: type[Entry | RowEntry] = self._row_entry_type
            name, form = str(user_key), ROW_SPARSE
            if kind.dense:
                entry_type, name = self._entry_type, self._tensor_name(user_key)
                form = 0 if self._compression is None else self._compression.form(name, kind.shape)
            network_key = self._runtime.register(
                self._namespace, str(user_key), kind.shape, kind.dtype.name, form=form
            )
            entry = entry_type(self._runtime, network_key, user_key)
            entry.tensor_name = name
            self._keys.add(entry)
            self._initialise(entry, initial)

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Sum values over all devices and ranks, and update the stored value with the sum.

        Without an optimizer the sum replaces the stored value.

        Args:
            key: int, str, or a list of them, all initialised.
            value: for each key an NDArray or a list of them, one for each device; never changed.
            priority: larger goes first on every link.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pushed then.
        """
        with self._short_call():
            self._push_and_update(self._keys.find(grouped(key, value, "push"), "push"), priority)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values, as they are after all that was pushed before, to one or several arrays each.

        Args:
            key: int, str, or a list of them, all initialised.
            out: for each key an NDArray or a list of them, one for each device.
            priority: ignored; a pull is a copy on this node.
            ignore_sparse: skip sparse arrays in `out`, as MXNet's stores do. If False, they get all rows.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pulled then.
        """
        with self._short_call():
            for entry, outs in self._pulled(key, out, ignore_sparse=ignore_sparse):
                entry.pull(outs)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None).

        All keys of a list are in flight before the first update.
        """
        with self._short_call():
            pushed = self._keys.find(grouped(key, value, "pushpull"), "pushpull")
            pulled = pushed if out is None else self._keys.find(grouped(key, out, "pushpull"), "pushpull")
            self._push_and_update(pushed, priority)
            for entry, outs in pulled:
                entry.pull(outs)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """`init`, then `pull` to `out`."""
        self.init(key, value)
        self._check_weights(key)
        self.pull(key, out=out, priority=priority)

    def row_sparse_pull(
        self, key: object, out: object = None, priority: int = 0, row_ids: object = None
    ) -> None:
        """Copy some rows of row-sparse values, as they are after all that was pushed before.

        Each of `out` gets the rows that its row numbers name, in order and without repeats.

        Args:
            key: int, str, or a list of them, all initialised with row-sparse arrays.
            out: for each key a row-sparse NDArray or a list of them.
            priority: ignored; a pull is a copy on this node.
            row_ids: row numbers of any type, in any order and perhaps repeated: an NDArray for all of `out`,
                or a list of one for each.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pulled then. A row number that
                the key does not have is an error of whatever reads its `out`.
        """
        self._check()
        paired = paired_with_row_ids(key, out, row_ids)
        entries = self._keys.find([(user_key, outs) for user_key, outs, _ in paired], "row_sparse_pull")
        pulls: list[tuple[RowEntry, NDArray, NDArray]] = []
        for (entry, outs), (user_key, _, ids) in zip(entries, paired, strict=True):
            if not isinstance(entry, RowEntry):
                raise UsageError(
                    f"row_sparse_pull of key {user_key!r}, which was initialised as a dense one; pull it, "
                    "or init it with a row_sparse one"
                )
            pulls.extend((entry, array, numbers) for array, numbers in zip(outs, ids, strict=True))
        for entry, array, numbers in pulls:
            self._pull_rows(entry, array, numbers, priority)

    # -------------------------------------------------------------------------------------------------
    # updating

    def set_optimizer(self, optimizer: object) -> None:
        """Update stored values with `optimizer`, on every rank alike.

        It stays the live object: a learning rate that is changed later counts from the next push on.
        """
        self._check()
        self._prepare()
        self._rule = CalledUpdater.of_optimizer(optimizer)
        self._checkpoints.optimizer_set(self._rule)
        self._optimizer_set(self._rule)
        self._updater = self._rule.updater

    @property
    def _updater(self) -> Updater | None:
        """The updater, which MXNet's Trainer reads here; waits until its states have all updates."""
        self._wait_for_updates()
        return self._given_updater

    @_updater.setter
    def _updater(self, updater: Updater | None) -> None:
        self._given_updater = updater

    def _set_updater(self, updater: object) -> None:
        """Update stored values with `updater(key, sum, stored)`, called on the pushing thread."""
        self._check()
        self._rule = CalledUpdater.of_function(updater)
        self._updater = self._rule.updater

    def set_gradient_compression(self, compression_params: object) -> None:
        """Send what is pushed from now on in fewer bytes, by a codec (docs/guides/compression.md).

        All ranks must call it, with the same values, between the same pushes.

        Args:
            compression_params: `type`, and the parameters of that codec, as in {'type': '2bit',
                'threshold': 0.5}; or a codec for each pattern of names, as in {'*bias': 'none', '*': 'int8'}.
                Names are those of parameters, if the optimizer that the store has been given knows them,
                else the keys.

        Raises:
            UsageError: another type, or a bad parameter; or auto in a reproducible job.
        """
        self._check()
        self._compression = compression_of(
            compression_params, size_lower_bound=self._runtime.settings.size_lower_bound
        )
        if self._compression.measures:
            self._runtime.refuse_if_reproducible("gradient compression 'auto'")
        describe_compression(self._runtime, self._compression.description)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, the same on all ranks, to a file; ranks may name the same file.

        With `dump_optimizer` the file has the optimizer, too, with its counts of updates. Without these Adam
        starts its bias correction again.

        Raises:
            UsageError: no optimizer has been set.
        """
        if self._rule is None or self._rule.of_states is None:
            raise UsageError(
                "save_optimizer_states: call set_optimizer first; there are no states without an optimizer"
            )
        self._wait_for_updates()
        self._rule.save(fname, dump_optimizer=dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote, in a job of however many nodes; every rank must.

        Raises:
            UsageError: the file is damaged; or no optimizer has been set.
            OSError: it cannot be read.
        """
        if self._rule is None or self._rule.of_states is None:
            raise UsageError("load_optimizer_states: call set_optimizer first, then load its states")
        self._wait_for_updates()
        self._rule.load(fname)

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _short_call(self) -> ShortCall:
        """Return what to queue operations within, after `_check`."""
        self._check()
        return SHORT_CALL

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        rule = self._rule
        self._checkpoints.pushed()
        fingerprint = "" if rule is None else rule.fingerprint()
        if self._elastic is not None:
            self._elastic.before_push([entry for entry, _ in pushed], self._keys.entries, rule)
            fingerprint += self._elastic.results.fingerprint
        compression, loss = self._compression, self._loss
        if compression is not None:
            self._check_compressed(pushed, compression)
            fingerprint += compression.fingerprint
        if loss is not None:
            fingerprint += f" {loss}"
        for entry, values in pushed:
            entry.push(
                values,
                priority=priority,
                rule=rule,
                fingerprint=fingerprint,
                compression=compression,
                loss=loss,
            )
        if rule is not None:
            for entry, _ in pushed:
                entry.update(rule)

    def _check_compressed(self, pushed: Given, compression: GradientCompression) -> None:
        for entry, values in pushed:
            name = entry.tensor_name
            compression.check_key(entry.key, "push", name)
            if compression.codec_of(name, entry.key.spec.shape) is not None:
                check_dense(values, entry.key, "push under gradient compression")

    def _tensor_name(self, user_key: int | str) -> str:
        """Return the name of the parameter that a key holds, as the optimizer knows it; else the key."""
        optimizer = None if self._rule is None else self._rule.optimizer
        parameter = getattr(optimizer, "param_dict", {}).get(user_key)
        if parameter is not None:
            return str(parameter.name)
        return str(getattr(optimizer, "idx2name", {}).get(user_key, user_key))

    def _wait_for_updates(self) -> None:
        """Wait until all updates that were pushed are made, or at least queued on the engine."""
        for entry in self._keys.entries():
            entry.wait_for_updates()

    def _pull_rows(self, entry: RowEntry, out: NDArray, row_ids: NDArray, priority: int) -> None:
        entry.pull_rows(out, row_ids)

    def _pulled(self, key: object, out: object, *, ignore_sparse: bool) -> Given:
        """Return the entries of keys that are pulled, and the arrays that are to get their values."""
        if out is None:
            raise UsageError("pull needs out: the arrays to write to")
        groups = grouped(key, out, "pull")
        if ignore_sparse:
            groups = [
                (user_key, [array for array in arrays if array.stype == "default"])
                for user_key, arrays in groups
            ]
        return self._keys.find(groups, "pull")

"""The KVStore that MXNet's users see: `mx.kv.create('dist_sync_netstorm')`.

Every method queues operations on MXNet's engine and returns. A push is a copy of the gradient into a private
array, the network operation on that array, and the updater behind it; a pull is a copy from the stored value.
The engine keeps the order, so keys and rounds overlap as far as the script's own data flow allows.

Private arrays are what makes this safe. An array of the user's may be in oneDNN's blocked layout, may share
its variable with another one, may be on a GPU, and belongs to the user again as soon as it has been copied;
none of that reaches the network.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Final

from netstorm.errors import Closed, UsageError
from netstorm.frontends.mxnet.arrays.arguments import (
    Fitting,
    Group,
    check_dense,
    check_fits,
    grouped,
    paired_with_row_ids,
)
from netstorm.frontends.mxnet.arrays.gil_calls import kind_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.entry import Entry
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression, compression_of
from netstorm.frontends.mxnet.store.profiling import profile_here
from netstorm.frontends.mxnet.store.row_entry import RowEntry
from netstorm.frontends.mxnet.store.server_commands import dead_nodes, obey
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.lifetime import (
    after_close,
    before_finish,
    runtime_of_this_process,
)
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key
from netstorm.pslite.system.interpreter_lock import SHORT_CALL, ShortCall

__all__ = ["NetStormKVStore"]

_ERRORS_AT_EXIT: Final = 100
"""Most independent errors of MXNet operations that are looked for at exit; each `waitall` raises one."""


@methods_raise_mxnet_errors
class NetStormKVStore(mx.kvstore.KVStore):  # type: ignore[name-defined]
    """A distributed, synchronous key-value store of general nodes.

    Every rank keeps a replica of every value and runs the optimiser on it, so all ranks hold the same bytes.
    It is a subclass of MXNet's own because `gluon.Trainer` insists on one for sparse gradients.
    """

    _entry_type: ClassVar[type[Entry]] = Entry

    _row_entry_type: ClassVar[type[RowEntry]] = RowEntry

    def __init__(self) -> None:
        """Join the job, if this process has not yet; waits until all nodes are here.

        Raises: netstorm.errors.NetStormError: the job does not come together; the message says why and who is
            missing.
        """
        handle = mx.base.KVStoreHandle()  # MXNet's profiler and destructor want a real one
        mx.base.check_call(mx.base._LIB.MXKVStoreCreate(b"local", ctypes.byref(handle)))  # noqa: SLF001
        super().__init__(handle)
        self._runtime: Final[Runtime] = runtime_of_this_process()
        self._namespace: Final = self._runtime.open_namespace()
        self._entries: Final[dict[int | str, Entry | RowEntry]] = {}
        self._fitting: Final = Fitting()
        self._rule: UpdateRule | None = None
        self._compression: GradientCompression | None = None
        profile_here(self.rank)

    # ---------------------------------------------------------------------------------------------- what it
    # is

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "_sync" in."""
        return "dist_sync_netstorm"

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._runtime.rank

    @property
    def num_workers(self) -> int:
        """How many nodes the job has."""
        return self._runtime.size

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can run the optimiser: it can."""
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return True
        raise UsageError(f"Unknown capability: {capability}")  # a ValueError, as MXNet's

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far: bytes, seconds on the network, counters (see `Runtime`)."""
        return self._runtime.statistics()

    # ------------------------------------------------------------------------------------------- keys and
    # values

    def init(self, key: Any, value: Any) -> None:
        """Make keys known and give them rank 0's values, on all ranks.

        Args:
            key: int, str, or a list of them; either int or str throughout a store.
            value: one NDArray a key; all ranks give the same shape and type.

        Raises:
            UsageError: a key that exists already, or an array that cannot be one's value. No key has been
                initialised then.
        """
        self._check()
        groups = grouped(key, value, "init")
        for user_key, values in groups:
            self._check_new(user_key, values)
        for user_key, (first, *_) in groups:
            kind = kind_of(first)
            entry: Entry | RowEntry
            if kind.dense:
                form = 0 if self._compression is None else self._compression.form.codec
                network_key = self._runtime.register(
                    self._namespace, str(user_key), kind.shape, kind.dtype.name, form=form
                )
                entry = self._entry_type(self._runtime, network_key, user_key)
            else:
                entry = self._row_entry_type(
                    self._runtime, self._namespace, user_key, kind.shape, kind.dtype.name
                )
            self._entries[user_key] = entry
            entry.begin_with(first if self.rank == 0 else None)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum values over all devices and ranks, and update the stored value with the sum (or replace it by
        the sum).

        Args:
            key: int, str, or a list of them, all initialised.
            value: for each key an NDArray or a list of them, one a device; never changed.
            priority: larger goes first on every link.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pushed then.
        """
        with self._short_call():
            self._push_and_update(self._found(grouped(key, value, "push"), "push"), priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values, as they are after all that was pushed before, to one or several arrays each.

        Args:
            key: int, str, or a list of them, all initialised.
            out: for each key an NDArray or a list of them, one a device.
            priority: no matter; a pull is a copy on this node.
            ignore_sparse: skip sparse arrays in `out`, as MXNet's stores do; else they get all rows.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pulled then.
        """
        with self._short_call():
            for entry, outs in self._pulled(key, out, ignore_sparse=ignore_sparse):
                entry.pull(outs)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None); all keys of a list are on their way before
        the first update.
        """
        with self._short_call():
            pushed = self._found(grouped(key, value, "pushpull"), "pushpull")
            pulled = pushed if out is None else self._found(grouped(key, out, "pushpull"), "pushpull")
            self._push_and_update(pushed, priority)
            for entry, outs in pulled:
                entry.pull(outs)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull` to `out`."""
        self.init(key, value)
        self.pull(key, out=out, priority=priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Copy some rows of row-sparse values, as they are after all that was pushed before.

        Each of `out` gets the rows that its row numbers name, in order and each once.

        Args:
            key: int, str, or a list of them, all initialised with row-sparse arrays.
            out: for each key a row-sparse NDArray or a list of them.
            priority: no matter; a pull is a copy on this node.
            row_ids: row numbers, unsorted and repeated as it may be, of any type: an NDArray for all of
                `out`, or a list of one for each.

        Raises:
            UsageError: a key or an array that does not fit. Nothing has been pulled then. A row number that
                is none is an error of whatever reads its `out`.
        """
        self._check()
        paired = paired_with_row_ids(key, out, row_ids)
        found = self._found([(user_key, outs) for user_key, outs, _ in paired], "row_sparse_pull")
        pulls: list[tuple[RowEntry, Any, Any]] = []
        for (entry, outs), (user_key, _, ids) in zip(found, paired, strict=True):
            if not isinstance(entry, RowEntry):
                raise UsageError(
                    f"row_sparse_pull of key {user_key!r}, which was initialised as a dense one; pull it, "
                    "or init it with a row_sparse one"
                )
            pulls.extend((entry, one, numbers) for one, numbers in zip(outs, ids, strict=True))
        for entry, one, numbers in pulls:
            self._pull_rows(entry, one, numbers, priority)

    # -------------------------------------------------------------------------------------------------
    # updating

    def set_optimizer(self, optimizer: Any) -> None:
        """Update stored values with `optimizer`, on every rank alike. It stays the live object: a learning
        rate that is changed later counts from the next push on.
        """
        self._check()
        self._rule = UpdateRule.of_optimizer(optimizer)
        self._updater = self._rule.updater

    @property
    def _updater(self) -> Any:
        """What MXNet's stores keep under this name, and its Trainer reads: with all updates that were pushed,
        so it waits for these.
        """
        self._settle()
        return self._given_updater

    @_updater.setter
    def _updater(self, updater: Any) -> None:
        self._given_updater = updater

    def _set_updater(self, updater: Any) -> None:
        """Update stored values with `updater(key, sum, stored)`, called on the pushing thread."""
        self._check()
        self._rule = UpdateRule.of_function(updater)
        self._updater = updater

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Send one of +t, 0 and -t for each value of what is pushed from now on, and keep the rest for the
        next push; a 16th of the bytes, and of a sum over the job's ranks still a small part.

        All ranks must call it, with the same values, between the same pushes.

        Args:
            compression_params: {'type': '2bit', 'threshold': t}; t is 0.5 if not given.

        Raises:
            UsageError: another type, or a threshold that is not greater than 0.
        """
        self._check()
        self._compression = compression_of(compression_params, self.num_workers)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimiser's states, the same on all ranks, to a file; ranks may name the same file.

        With `dump_optimizer` the optimiser is in it, too: its counts of updates, without which Adam begins
        anew.
        """
        if self._rule is None or not self._rule.has_states:
            raise UsageError(
                "save_optimizer_states: call set_optimizer first; there are no states without an optimizer"
            )
        self._settle()
        self._rule.save(fname, dump_optimizer=dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote, in a job of however many nodes; every rank must.

        Raises:
            UsageError: the file is damaged; or no optimiser has been set.
            OSError: it cannot be read.
        """
        if self._rule is None or not self._rule.has_states:
            raise UsageError("load_optimizer_states: call set_optimizer first, then load its states")
        self._settle()
        self._rule.load(fname)

    def _barrier(self) -> None:
        """Wait until all ranks are here."""
        self._runtime.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        obey(head, body)

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """Return how many nodes of a group are dead.

        Groups have ps-lite's numbers: 1 is the scheduler, 2 and 4 are nodes, 7 is all. What counts as dead
        is PS_HEARTBEAT_TIMEOUT's to say, not `timeout`'s. MXNet has this in its C++ interface only.
        """
        return dead_nodes(self._runtime, node_id)

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _short_call(self) -> ShortCall:
        """Return what to queue operations within, after `_check`."""
        self._check()
        return SHORT_CALL

    def _check(self) -> None:
        """Raise what has made the store useless, if anything has; the script's own failure rather than what
        it led to.
        """
        try:
            self._runtime.check()
        except Closed:
            for entry in self._entries.values():
                if entry.skipped is not None:
                    entry.skipped.wait_to_read()
            raise

    def _push_and_update(self, pushed: list[tuple[Entry | RowEntry, list[Any]]], priority: int) -> None:
        rule = self._rule
        said = "" if rule is None else rule.now()
        compression = self._compression
        if compression is not None:
            for entry, values in pushed:
                compression.check_key(entry.key, "push")
                check_dense(values, entry.key, "push under gradient compression")
            said += compression.text
        for entry, values in pushed:
            entry.push(values, priority=priority, rule=rule, said=said, compression=compression)
        if rule is not None:
            for entry, _ in pushed:
                entry.update(rule)

    def _settle(self) -> None:
        """Wait until all updates that were pushed are made, or at least queued on the engine."""
        for entry in self._entries.values():
            entry.settle()

    def _pull_rows(self, entry: Any, out: Any, row_ids: Any, priority: int) -> None:
        entry.pull_rows(out, row_ids)

    def _pulled(self, key: Any, out: Any, *, ignore_sparse: bool) -> list[tuple[Any, list[Any]]]:
        """Return the entries of keys that are pulled, and the arrays that are to get their values."""
        if out is None:
            raise UsageError("pull needs out: the arrays to write to")
        groups = grouped(key, out, "pull")
        if ignore_sparse:
            groups = [
                (one, [array for array in arrays if array.stype == "default"]) for one, arrays in groups
            ]
        return self._found(groups, "pull")

    def _found(self, groups: list[Group], what: str) -> list[tuple[Entry | RowEntry, list[Any]]]:
        """Return the entries of keys, whose arrays have been checked."""
        found = []
        for user_key, arrays in groups:
            entry = self._entries.get(user_key)
            if entry is None:
                self._check_type(user_key, what)
                known = ", ".join(map(str, list(self._entries)[:5])) or "none"
                raise UsageError(
                    f"{what} of key {user_key!r}, which has not been initialised; init it first "
                    f"(keys: {known})"
                )
            self._fitting.check(arrays, entry.key, what)
            found.append((entry, arrays))
        return found

    def _check_new(self, user_key: int | str, values: list[Any]) -> None:
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
        if self._compression is not None:
            self._compression.check_key(key, "init")

    def _check_type(self, user_key: int | str, what: str) -> None:
        """Check that a key is of the type of those that exist: 3 and "3" are the same to MXNet's users."""
        other = next(
            (known for known in self._entries if isinstance(known, str) != isinstance(user_key, str)), None
        )
        if other is not None:
            raise UsageError(
                f"{what} of key {user_key!r}: this store has {type(other).__name__} keys, such as {other!r}; "
                "keys must be all int or all str"
            )


def _forget_errors() -> None:
    """Take what MXNet would raise, with a traceback, in its own exit function: it has been reported."""
    for _ in range(_ERRORS_AT_EXIT):
        try:
            mx.nd.waitall()
        except mx.base.MXNetError:
            continue
        return


before_finish(mx.nd.waitall)
after_close(_forget_errors)

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
from pathlib import Path
from typing import Any, Final

import numpy as np

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.arguments import grouped
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.private import PrivateArray
from netstorm.frontends.mxnet.update_rule import UpdateRule, write_atomically
from netstorm.kvstore.keys import Key
from netstorm.kvstore.lifetime import after_close, before_finish, runtime_of_this_process
from netstorm.kvstore.operation import Operation
from netstorm.kvstore.runtime import Runtime

__all__ = ["NetStormKVStore"]

_ERRORS_AT_EXIT: Final = 100
"""Most independent errors of MXNet operations that are looked for at exit; each `waitall` raises one."""


class _Entry:
    """One key: its value here, and the array that its rounds travel through."""

    __slots__ = ("key", "merged", "stored", "user_key")

    def __init__(self, key: Key, user_key: int | str, stored: PrivateArray) -> None:
        self.key = key
        self.user_key = user_key
        self.stored = stored
        self.merged: PrivateArray | None = None
        """The sum, for an updater. Made at the first push: many keys of a frozen layer never have one."""

    def array_for_sums(self) -> PrivateArray:
        """Return `merged`, made if need be."""
        if self.merged is None:
            self.merged = PrivateArray.like(self.stored.array)
        return self.merged


class NetStormKVStore(mx.kvstore.KVStore):  # type: ignore[name-defined]
    """A distributed, synchronous key-value store of general nodes.

    Every rank keeps a replica of every value and runs the optimiser on it, so all ranks hold the same bytes.
    It is a subclass of MXNet's own because `gluon.Trainer` insists on one for sparse gradients.
    """

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
        self._entries: Final[dict[str, _Entry]] = {}
        self._rule: UpdateRule | None = None

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
        raise mx.base.MXNetError(f"Unknown capability: {capability}")

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far: bytes, seconds on the network, counters (see `Runtime`)."""
        return self._runtime.statistics()

    # ------------------------------------------------------------------------------------------- keys and
    # values

    def init(self, key: Any, value: Any) -> None:
        """Make keys known and give them rank 0's values, on all ranks.

        Args:
            key: int, str, or a list of them.
            value: one NDArray a key; all ranks give the same shape and type.

        Raises:
            UsageError: a key that exists already, or an array that cannot be one's value.
        """
        self._runtime.check()
        for user_key, values in grouped(key, value, "init"):
            if str(user_key) in self._entries:
                raise UsageError(
                    f"key {user_key!r} has been initialised before; each key is initialised once a store"
                )
            first = _dense(values[0], user_key, "initialise")
            network_key = self._runtime.register(
                self._namespace, str(user_key), tuple(first.shape), _dtype(first)
            )
            entry = self._entries[str(user_key)] = _Entry(network_key, user_key, PrivateArray.like(first))
            if self.rank == 0:
                entry.stored.copy_from(first)
            self._allreduce(entry, entry.stored, priority=0, rule="", contributes=self.rank == 0)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum values over all devices and ranks, and update the stored value with the sum (or replace it by
        the sum).

        Args:
            key: int, str, or a list of them, all initialised.
            value: for each key an NDArray or a list of them, one a device; never changed.
            priority: larger goes first on every link.
        """
        self._runtime.check()
        pushed = self._push_all(key, value, priority)
        self._update_all(pushed)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values, as they are after all that was pushed before, to one or several arrays each."""
        self._runtime.check()
        if out is None:
            raise UsageError("pull needs out: the arrays to write to")
        for user_key, outs in grouped(key, out, "pull"):
            self._copy_out(self._entry(user_key, "pull"), outs, ignore_sparse=ignore_sparse)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None); all keys of a list are on their way before
        the first update.
        """
        self._runtime.check()
        pushed = self._push_all(key, value, priority)
        self._update_all(pushed)
        for user_key, outs in grouped(key, value if out is None else out, "pushpull"):
            self._copy_out(self._entry(user_key, "pushpull"), outs, ignore_sparse=False)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull` to `out`."""
        self.init(key, value)
        self.pull(key, out=out, priority=priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Refuse: this version has dense values only."""
        raise UsageError(
            "row_sparse_pull: sparse values are not supported by this version; use dense parameters"
        )

    # -------------------------------------------------------------------------------------------------
    # updating

    def set_optimizer(self, optimizer: Any) -> None:
        """Update stored values with `optimizer`, on every rank alike. It stays the live object: a learning
        rate that is changed later counts from the next push on.
        """
        self._runtime.check()
        self._rule = UpdateRule.of_optimizer(optimizer)
        self._updater = self._rule.updater

    def _set_updater(self, updater: Any) -> None:
        """Update stored values with `updater(key, sum, stored)`, called on the pushing thread."""
        self._runtime.check()
        self._rule = UpdateRule.of_function(updater)
        self._updater = updater

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Refuse: this version sends plain values."""
        raise UsageError(
            f"gradient compression {compression_params!r} is not supported by this version; "
            "leave compression_params out"
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimiser's states, the same on all ranks, to a file; ranks may name the same file."""
        if self._rule is None or not self._rule.has_states:
            raise UsageError(
                "save_optimizer_states: call set_optimizer first; there are no states without an optimizer"
            )
        write_atomically(fname, self._rule.updater.get_states(dump_optimizer))

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote; every rank must."""
        if self._rule is None or not self._rule.has_states:
            raise UsageError("load_optimizer_states: call set_optimizer first, then load its states")
        self._rule.load(Path(fname).read_bytes())

    def _barrier(self) -> None:
        """Wait until all ranks are here."""
        self._runtime.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        raise UsageError(
            "there are no servers to send a command to: every node of NetStorm trains and aggregates"
        )

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _entry(self, user_key: int | str, what: str) -> _Entry:
        entry = self._entries.get(str(user_key))
        if entry is None:
            known = ", ".join(list(self._entries)[:5]) or "none"
            raise UsageError(
                f"{what} of key {user_key!r}, which has not been initialised; init it first (keys: {known})"
            )
        return entry

    def _push_all(self, key: Any, value: Any, priority: int) -> list[_Entry]:
        checked = [
            (entry := self._entry(user_key, "push"), [_checked(array, entry, "push") for array in values])
            for user_key, values in grouped(key, value, "push")
        ]  # before anything is queued: a bad array must not leave half of a step behind
        rule = "" if self._rule is None else self._rule.now()
        for entry, values in checked:
            # Without an updater the sum replaces the stored value: it travels there, and is not copied again.
            summed = entry.stored if self._rule is None else entry.array_for_sums()
            summed.sum_of(values)
            self._allreduce(entry, summed, priority=priority, rule=rule, contributes=True)
        return [entry for entry, _ in checked]

    def _update_all(self, entries: list[_Entry]) -> None:
        if self._rule is None:
            return
        for entry in entries:
            self._rule.updater(entry.user_key, entry.array_for_sums().array, entry.stored.array)
            self._compare(entry)

    def _compare(self, entry: _Entry) -> None:
        """Once in a while, have the replicas of a value compared, behind the update that is queued."""
        key, round, runtime = entry.key, entry.key.last_taken, self._runtime
        every = runtime.settings.compare_rounds
        if every == 0 or round % every:
            return

        def start(completion: Completion) -> None:
            runtime.report_replica(key, round, np.frombuffer(entry.stored.memory(), np.uint8))
            completion.succeed()

        push_async(start, reads=(entry.stored.array,), writes=(), name="netstorm_compare")

    def _copy_out(self, entry: _Entry, outs: list[NDArray], *, ignore_sparse: bool) -> None:
        for out in outs:
            if out.stype != "default" and ignore_sparse:
                continue
            entry.stored.copy_to(_checked(out, entry, "pull"))

    def _allreduce(
        self, entry: _Entry, array: PrivateArray, *, priority: int, rule: str, contributes: bool
    ) -> None:
        """Queue the network's part: `array` becomes the sum of all ranks' `array`s (zeros where one does not
        contribute).
        """
        key, runtime = entry.key, self._runtime
        round = key.take_round()

        def start(completion: Completion) -> None:
            memory = np.frombuffer(array.memory(), key.dtype)

            def done(error: Exception | None) -> None:
                if error is None:
                    completion.succeed()
                else:
                    completion.fail(error)

            runtime.submit(
                Operation(
                    key=key,
                    round=round,
                    source=memory if contributes else None,
                    destination=memory,
                    done=done,
                    priority=priority,
                    rule=rule,
                )
            )

        def skipped() -> None:
            runtime.fail(
                f"round {round} of {key.name} has nothing to send: an operation that it depends on has failed"
            )

        push_async(
            start,
            reads=(),
            writes=(array.array,),
            name="netstorm_allreduce",
            priority=priority,
            skipped=skipped,
        )


def _dtype(array: NDArray) -> str:
    return str(np.dtype(array.dtype).name)


def _dense(array: NDArray, user_key: int | str, what: str) -> NDArray:
    if not isinstance(array, mx.nd.NDArray):
        raise UsageError(
            f"cannot {what} key {user_key!r} with {type(array).__name__}; it must be an mxnet NDArray"
        )
    if array.stype != "default":
        raise UsageError(
            f"cannot {what} key {user_key!r} with a {array.stype} array: this version has dense values only; "
            "call tostype('default')"
        )
    return array


def _checked(array: NDArray, entry: _Entry, what: str) -> NDArray:
    """Return `array` if it can be pushed to or pulled from `entry`."""
    _dense(array, entry.user_key, what)
    shape, dtype = tuple(array.shape), _dtype(array)
    if shape != entry.key.spec.shape or dtype != entry.key.spec.dtype:
        raise KeyMismatch(
            f"{what} of key {entry.user_key!r}: the array is {shape} {dtype}, the key was initialised as "
            f"{entry.key.spec.shape} {entry.key.spec.dtype}"
        )
    return array


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

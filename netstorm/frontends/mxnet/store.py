"""The KVStore that MXNet's users see: `mx.kv.create('dist_sync_netstorm')`.

Every method queues operations on MXNet's engine and returns. A push is a copy of the gradient into a staging
buffer, the network operation on that buffer, and the updater behind it. A pull is a copy of the stored value.
The engine keeps the order, so keys and rounds overlap as far as the script's own data flow allows.

Staging buffers make this safe. An array of the user's may be in oneDNN's blocked layout, may share its
variable with another one, may be on a GPU, and belongs to the user again as soon as it has been copied. None
of that reaches the network.
"""

from __future__ import annotations

from typing import ClassVar

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.arguments import check_dense, grouped, paired_with_row_ids
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.elastic_store import ElasticStore
from netstorm.frontends.mxnet.store.entry import Entry
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression, compression_of
from netstorm.frontends.mxnet.store.key_table import Given
from netstorm.frontends.mxnet.store.row_entry import RowEntry
from netstorm.frontends.mxnet.updates.update_rule import Updater, UpdateRule
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.runtime import describe_compression
from netstorm.pslite.system import SHORT_CALL, ShortCall

__all__ = ["NetStormKVStore"]


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
            entry: Entry | RowEntry
            if kind.dense:
                name = self._tensor_name(user_key)
                form = 0 if self._compression is None else self._compression.form(name, kind.shape)
                network_key = self._runtime.register(
                    self._namespace, str(user_key), kind.shape, kind.dtype.name, form=form
                )
                entry = self._entry_type(self._runtime, network_key, user_key)
                entry.tensor_name = name
            else:
                entry = self._row_entry_type(
                    self._runtime, self._namespace, user_key, kind.shape, kind.dtype.name
                )
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
        found = self._keys.find([(user_key, outs) for user_key, outs, _ in paired], "row_sparse_pull")
        pulls: list[tuple[RowEntry, NDArray, NDArray]] = []
        for (entry, outs), (user_key, _, ids) in zip(found, paired, strict=True):
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
        self._rule = UpdateRule.of_optimizer(optimizer)
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
        self._rule = UpdateRule.of_function(updater)
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
            if compression.codec_of(name) is not None:
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

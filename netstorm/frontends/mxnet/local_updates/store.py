"""What stores with local updates share: pushes update this rank's own values, which are averaged at times."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.local_updates.entry import DueAverage, LocalEntry, check_averages
from netstorm.frontends.mxnet.local_updates.schedule import Average, Periodic, Schedule
from netstorm.frontends.mxnet.store.key_table import AnyEntry, Given
from netstorm.frontends.mxnet.store.store import NetStormKVStore
from netstorm.kvstore.calls import Sites

__all__ = ["LocalUpdatesKVStore"]

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
        live = self._runtime.node.requests.live
        members = live.first_members if live.is_elastic else self._runtime.node.members
        self._schedule: Schedule = Periodic("none", k1=1, k2=1)
        self._sites: Final = Sites.of(members, self.rank)
        self._pushed: Final[set[object]] = set()
        """Keys that were pushed in this step."""
        self._follows = Average.ALL
        """What follows the step. Before the first one all ranks have the same values, too."""
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
    def is_averaged(self) -> bool:
        """Whether all ranks have the same values now: the last step was followed by an average of all."""
        return self._follows is Average.ALL

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
        return {"averages": self._schedule.averages}

    def _go_on_from(self, progress: Any) -> None:
        self._schedule.go_on_at(int(progress["averages"]))
        self._pushed.clear()
        self._follows = Average.ALL

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        super()._initialise(entry, initial)
        assert isinstance(entry, LocalEntry)
        if self._compression is not None and self._compression.codec_of(entry.tensor_name) is not None:
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
            if elastic is not None and self._follows is Average.ALL:
                elastic.begin_period(self._keys.entries, self._rule)
            self._pushed.clear()
            self._follows = self._schedule.next_step(hurries=elastic is not None and not elastic.contributes)
        self._pushed.update(keys)

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        rule, compression = self._rule, self._compression
        assert rule is not None
        self._checkpoints.pushed()
        fingerprint = f"{self._schedule.fingerprint} {rule.fixed_fingerprint}"
        if compression is not None:
            fingerprint += compression.fingerprint
            for entry, _ in pushed:
                compression.check_key(entry.key, "push", entry.tensor_name)
        for entry, values in pushed:
            assert isinstance(entry, LocalEntry)
            entry.step(values, rule)
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
            codec=None if compression is None else compression.codec_of(entry.tensor_name),
        )

    def _check_checkpoint(self, what: str) -> None:
        self._check()
        if what == "save_checkpoint" and not self.is_averaged:
            raise UsageError(
                "save_checkpoint: ranks have values of their own between averages: save right after an "
                "average of all, when kv.is_averaged is true"
            )

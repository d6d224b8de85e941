"""The part of a store that belongs to an elastic job: who is in, and what a rank gets that joins later."""

from __future__ import annotations

import logging

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.checkpoint import check_trainer
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic.elastic_job import ElasticJob
from netstorm.frontends.mxnet.elastic.script_states import Get, Set, trainer_state
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.checkpointed_store import CheckpointedStore
from netstorm.frontends.mxnet.store.key_table import AnyEntry
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.lifetime import before_finish
from netstorm.protocol.ids import ranks_in

__all__ = ["ElasticStore"]

_log = logging.getLogger(__name__)


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
        if self._is_replicated and self._runtime.node.requests.live.is_elastic:
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
        return tuple(range(self.num_workers)) if self._elastic is None else self._elastic.live_ranks

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

    def _optimizer_set(self, rule: UpdateRule) -> None:
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

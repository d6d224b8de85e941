"""Local updates in elastic jobs: ranks die and come between two averages of all.

Right after an average of all ranks they have the same parameters. A period begins then. So that is when the
state is offered to ranks that join later: the parameters, and the optimizer's state of one rank. All offer
theirs, since any of them may leave; optimizers differ, so a newcomer takes what one of them offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.elastic.ranks import group_of_all_ranks
from netstorm.frontends.torch.elastic.state import ElasticState
from netstorm.kvstore.process.elastic import JobState

__all__ = ["ElasticPeriods", "Travels"]


class Travels(Protocol):
    """What knows how far a training is."""

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins later, besides model and optimizer."""

    def take_elastic_state(self, state: dict[str, Any]) -> None:
        """Go on from what another rank has returned."""


class _Progress:
    """A training, as `ElasticState` takes it."""

    def __init__(self, training: Travels) -> None:
        self._training: Final = training

    def state_dict(self) -> dict[str, Any]:
        return self._training.elastic_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._training.take_elastic_state(state)


class ElasticPeriods:
    """The periods of one training at one rank of an elastic job.

    Attributes:
        state: what travels to ranks that join later.
        is_newcomer: this rank has joined later.
        ends: the last step has ended a period. The next one begins with the next step, when the program has
            counted the last one.
    """

    def __init__(
        self,
        training: Travels,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        entries: Mapping[str, Any],
    ) -> None:
        """Begin before the first period.

        Args:
            training: says how far it is.
            modules: whose parameters and buffers travel.
            optimizer: its state does.
            entries: what else does, as `ElasticState` takes it.

        Raises:
            UsageError: an entry that cannot be held, or whose name is taken.
        """
        own: dict[str, Any] = {f"model {place}": module for place, module in enumerate(modules)}
        own_names = {*own, "optimizer", "training"}
        if own_names & set(entries):
            raise UsageError(f"state={sorted(entries)}: {sorted(own_names)} are there already")
        self._member: Final = group_of_all_ranks().member
        self._job: Final = JobState(self._member.runtime)
        self.is_newcomer: Final = self._job.is_needed
        self.ends = False
        self.state: Final = ElasticState(
            verify_every=0, **own, optimizer=optimizer, training=_Progress(training), **entries
        )

    @property
    def has_begun(self) -> bool:
        """Whether there has been a period."""
        return self.state.number > 0

    @property
    def hurries(self) -> bool:
        """Whether this rank has joined later and has not caught up: its parameters are in no average yet, so
        it goes on to the next one after each step.
        """
        return not self._job.contributes

    @property
    def counted(self) -> bool:
        """Whether this rank's values are in all averages of this period so far."""
        ranks = self._member.reduced_by
        return ranks is None or bool(ranks >> self._member.runtime.rank & 1)

    def begin(self) -> None:
        """Begin a period: all ranks have the same parameters. A newcomer's first one gives it those of the
        others.

        Raises:
            NetStormError: as of `ElasticState.step`.
        """
        self.ends = False
        self.state.step()

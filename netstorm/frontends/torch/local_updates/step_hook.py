"""What `LocalSGD` and `DiLoCo` share: a context in which something follows each step of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from netstorm.errors import UsageError
from netstorm.frontends.torch.elastic.state import ElasticState
from netstorm.frontends.torch.local_updates.agreement import Settings, check_agreement
from netstorm.frontends.torch.local_updates.elastic.periods import ElasticPeriods
from netstorm.frontends.torch.local_updates.parameters import everything_in
from netstorm.frontends.torch.local_updates.ranks import ElasticRanks, ProcessGroupRanks

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = ["StepHook"]


class StepHook(ABC):
    """A context manager that counts the steps of an optimizer.

    The first time that it is entered, all ranks take the parameters and buffers of the first rank, as DDP
    does. Each time, they compare their settings. In an elastic job they take those that most ranks have, or
    the lowest; a rank that joins later takes those of the last average, with all settings.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        ranks: ProcessGroupRanks,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._ranks = ranks
        self._elastic = (
            ElasticPeriods(self, modules, optimizer, state or {}) if isinstance(ranks, ElasticRanks) else None
        )
        self._hooks: list[RemovableHandle] = []
        self._steps = 0
        self._started = False

    @property
    def steps(self) -> int:
        """How many steps of the optimizer have been counted."""
        return self._steps

    @property
    def state(self) -> ElasticState:
        """What travels to ranks that join an elastic job later.

        Raises:
            UsageError: the job is not elastic.
        """
        if self._elastic is None:
            raise UsageError(f"{type(self).__name__}.state: the job is not elastic (NETSTORM_ELASTIC)")
        return self._elastic.state

    def __enter__(self) -> Self:
        name = type(self).__name__
        if self._hooks:
            raise UsageError(f"this {name} has been entered already: leave it before you enter it again")
        self._before_entering()
        if self._elastic is None:
            mine = {**self._settings(), **self._progress()}
            check_agreement(name, self._ranks.exchange(mine, f"the settings of {name}"))
        self._begin_alike()
        self._hooks = [self._optimizer.register_step_post_hook(self._after_optimizer)]
        if self._elastic is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(self._before_optimizer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._on_leaving(failed=kind is not None)

    def _begin_alike(self) -> None:
        """Give all ranks the same parameters and buffers, the first time."""
        had_started, self._started = self._started, True
        elastic = self._elastic
        if elastic is None and not had_started:
            for flat in everything_in(self._modules):
                values = flat.read()
                self._ranks.take_from_first(values)
                flat.write(values)
            self._after_starting()
        elif elastic is not None and not elastic.has_begun:
            elastic.begin()
            if not had_started and not elastic.is_newcomer:
                self._after_starting()

    def _after_optimizer(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._steps += 1
        elastic = self._elastic
        if elastic is None:
            self._after_step()
            return
        if elastic.hurries:
            self._steps = self._next_average(self._steps)
        self._after_step()
        elastic.ends = self._period_ends()
        if not elastic.counted:
            self._forget_uncounted()

    def _before_optimizer(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._elastic is not None and self._elastic.ends:
            self._elastic.begin()

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins an elastic job later, besides model and optimizer."""
        return self.state_dict()

    def take_elastic_state(self, state: dict[str, Any]) -> None:
        """Go on from what another rank has returned."""
        self.load_state_dict(state)

    def _progress(self) -> Settings:
        """Return how far this rank is, which all ranks must agree on, too."""
        return {"the number of steps so far": self._steps}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return how far the training is, and what it keeps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""

    @abstractmethod
    def _next_average(self, step: int) -> int:
        """Return the first step from `step` on that an average of all ranks follows."""

    @abstractmethod
    def _forget_uncounted(self) -> None:
        """Forget what is kept of this rank's steps, none of which has counted: it has just joined."""

    @abstractmethod
    def _period_ends(self) -> bool:
        """Return whether an average of all ranks has followed the last step, and nothing is under way."""

    @abstractmethod
    def _settings(self) -> Settings:
        """Return what all ranks must agree on."""

    @abstractmethod
    def _after_step(self) -> None:
        """Do what is due after `steps` steps."""

    @abstractmethod
    def _before_entering(self) -> None:
        """Refuse to be entered, if there is a reason."""

    @abstractmethod
    def _after_starting(self) -> None:
        """Take note of the parameters, which are now the same at all ranks."""

    @abstractmethod
    def _on_leaving(self, *, failed: bool) -> None:
        """End what is under way; `failed` says that an exception leaves the context."""

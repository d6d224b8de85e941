"""Local SGD: ranks train alone, and every few steps average their parameters (Stich, arXiv 1805.09767)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.agreement import Settings, differences
from netstorm.frontends.torch.local_updates.codecs import Exchange, Float32
from netstorm.frontends.torch.local_updates.fragment import accumulator_type, check_finite
from netstorm.frontends.torch.local_updates.parameters import by_kind
from netstorm.frontends.torch.local_updates.ranks import ProcessGroupRanks, Ranks
from netstorm.frontends.torch.local_updates.step_hook import StepHook

__all__ = ["LocalSGD"]


class LocalSGD(StepHook):
    """Averages the parameters of a model over all ranks, every `sync_every` steps of its optimizer.

    ```python
    with LocalSGD(model, optimizer, sync_every=10):
        for batch in batches:
            ...
            optimizer.step()  # every tenth one also averages
    ```

    Buffers, such as BatchNorm's statistics, and the optimizer's state stay each rank's own. An average
    blocks, for the process group's time-out at most.

    Args:
        model: whose parameters are averaged; those that need no gradient are not.
        optimizer: whose steps are counted.
        sync_every: steps between averages.
        group: the ranks to average over; None is the default group.
        state: in an elastic job, what else travels to ranks that join later, as `ElasticState` takes it.

    Raises:
        UsageError: a value is not allowed, or there is no process group.
        Disagreement: on entering; ranks have different settings.
        NonFiniteUpdate: in `optimizer.step()`, at all ranks; the average is not finite. Parameters stay as
            they were.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        *,
        group: dist.ProcessGroup | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if sync_every < 1:
            raise UsageError(f"sync_every={sync_every}: it must be at least 1 step")
        super().__init__([model], optimizer, ProcessGroupRanks.of(group), state)
        self._sync_every = sync_every
        self._flat = by_kind(parameter for parameter in model.parameters() if parameter.requires_grad)
        if not self._flat:
            raise UsageError(f"the model ({type(model).__name__}) has no parameters that need a gradient")

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters: the last step was followed by an average of all."""
        return self._period_ends()

    def sync(self) -> None:
        """Average now; all ranks must call it at the same step."""
        self._average(self._ranks)

    def _average(self, ranks: Ranks) -> None:
        exchanges = [
            Exchange(Float32(), flat.read().to(accumulator_type(flat.dtype)), ranks) for flat in self._flat
        ]
        averages = [exchange.finish() for exchange in exchanges]
        check_finite(averages, "the average of the model", self._flat)
        for flat, average in zip(self._flat, averages, strict=True):
            flat.write(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the settings; parameters are in the model's own `state_dict()`."""
        return {"steps": self._steps, "started": self._started, "settings": dict(self._settings())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, saved with the same settings; load the model and the optimizer as well."""
        differing = differences(state["settings"], self._settings())
        if differing:
            name, saved, mine = differing[0]
            raise UsageError(f"the checkpoint was saved with {name}={saved}, but this LocalSGD has {mine}")
        self._steps = int(state["steps"])
        self._started = bool(state["started"])

    def _settings(self) -> Settings:
        return {
            "sync_every": self._sync_every,
            "the model's parameters": [f"{flat.size} x {flat.dtype}" for flat in self._flat],
        }

    def _before_entering(self) -> None:
        for flat in self._flat:
            flat.check_unchanged("the model")

    def _after_starting(self) -> None:
        """There is no copy of the parameters."""

    def _after_step(self) -> None:
        if self._steps % self._sync_every == 0:
            self.sync()

    def _next_average(self, step: int) -> int:
        return -(-step // self._sync_every) * self._sync_every

    def _period_ends(self) -> bool:
        return self._steps % self._sync_every == 0

    def _forget_uncounted(self) -> None:
        """Nothing is kept from one average to the next."""

    def _on_leaving(self, *, failed: bool) -> None:
        """Nothing is ever under way between steps."""

"""ESync: each rank takes as many steps between averages as fit into the time of the slowest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.agreement import Settings
from netstorm.frontends.torch.local_updates.local_sgd import LocalSGD
from netstorm.frontends.torch.names import NAME
from netstorm.kvstore.process.elastic import StepPacer
from netstorm.kvstore.process.runtime import runtime_of_this_process

__all__ = ["ESync"]


class ESync(LocalSGD):
    """Averages parameters over all ranks, each of which has taken as many steps as the state server says.

    ```python
    with ESync(model, optimizer) as training:
        while training.averages < 100:
            ...
            optimizer.step()  # the last one of a round also averages
    ```

    Ranks take different numbers of steps, so a loop counts averages. A rank that is four times slower takes
    one step while the others take four. The scheduler computes the numbers from what ranks measure (Li et
    al., IEEE TSC 2022). See `LocalSGD` for what else holds.

    Args:
        model: whose parameters are averaged; those that need no gradient are not.
        optimizer: whose steps are counted.
        least_steps: steps of the slowest rank between averages.
        most_steps: bound for all ranks: after many steps alone parameters are far apart.
        state: in an elastic job, what else travels to ranks that join later, as `ElasticState` takes it.

    Raises:
        UsageError: a value is not allowed; or the default process group is not NetStorm's.
        Disagreement: on entering; ranks have different settings.
        NonFiniteUpdate: in `optimizer.step()`, at all ranks; the average is not finite. Parameters stay as
            they were.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        least_steps: int = 1,
        most_steps: int = 100,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, max(1, least_steps), state=state)
        if NAME not in dist.get_backend():
            raise UsageError(
                f"ESync in a default process group of {dist.get_backend()!r}: its state server is NetStorm's "
                "scheduler; call init_process_group('netstorm')"
            )
        runtime = runtime_of_this_process(framework="PyTorch")
        self._bounds = (least_steps, most_steps)
        self._pacer = StepPacer(runtime, least=least_steps, most=most_steps)
        self._paces = runtime.size > 1 or self._elastic is not None
        self._taken = 0
        self._rounds = 0
        """Reported to the state server: those of this process, and of the job before it joined."""
        self._averages = 0

    @property
    def averages(self) -> int:
        """How many averages there have been."""
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps and averages, and the settings; call it right after an average.

        Raises:
            UsageError: this rank has taken steps since the last one: others have taken another number.
        """
        if self._taken:
            raise UsageError(f"{self._taken} steps after an average: save right after one, when ranks agree")
        return {**super().state_dict(), "averages": self._averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; load the model and the optimizer as well."""
        super().load_state_dict(state)
        self._averages = int(state["averages"])

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins an elastic job later."""
        return {**super().state_dict(), "averages": self._averages, "rounds": self._rounds}

    def take_elastic_state(self, state: dict[str, Any]) -> None:
        """Go on from what another rank has returned."""
        self.load_state_dict(state)
        self._rounds = int(state["rounds"])

    def _next_average(self, step: int) -> int:
        return step

    def _period_ends(self) -> bool:
        return self._taken == 0

    def _settings(self) -> Settings:
        least, most = self._bounds
        return {**super()._settings(), "least_steps": least, "most_steps": most}

    def _progress(self) -> Settings:
        return {"the number of averages so far": self._averages}

    def _after_step(self) -> None:
        self._taken += 1
        hurries = self._elastic is not None and self._elastic.hurries
        if not hurries and self._taken < (self._pacer.steps() if self._paces else self._bounds[0]):
            return
        if self._paces:
            self._pacer.round_ends(self._taken)
            if any(flat.device.type == "cuda" for flat in self._flat):
                torch.cuda.synchronize()  # steps are queued there; what they take is what others wait for
            self._pacer.exchange_begins(self._rounds)
        self.sync()
        if self._paces:
            self._pacer.exchange_ends()
            self._rounds += 1
        self._averages += 1
        self._taken = 0

"""DiLoCo: an outer optimizer over what ranks have learnt alone (arXiv 2311.08105; streaming: 2501.18512)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs.averages import Descriptions
from netstorm.frontends.torch.local_updates.agreement import Settings, differences
from netstorm.frontends.torch.local_updates.codecs import CodecFactory, codecs_of_vectors
from netstorm.frontends.torch.local_updates.fragment import Fragment
from netstorm.frontends.torch.local_updates.membership import outer_optimizers, trained_parameters
from netstorm.frontends.torch.local_updates.ranks import ElasticRanks, ProcessGroupRanks
from netstorm.frontends.torch.local_updates.schedule import Schedule
from netstorm.frontends.torch.local_updates.step_hook import StepHook

__all__ = ["DiLoCo"]


class DiLoCo(StepHook):
    """Averages what ranks have learnt in `sync_every` steps, and gives it to an outer optimizer.

    ```python
    inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo([model], inner, outer, sync_every=100):
        for batch in batches:
            ...
            inner.step()  # every hundredth one also synchronises
    ```

    Each fragment is synchronised once in `sync_every` steps, at steps that are spread evenly. Its outer
    gradient is its global minus its local parameters. The average over all ranks is the gradient for a step
    of the outer optimizer on the global parameters, which have the same bits at all ranks.

    Args:
        model_fragments: modules that share no parameters and together have all that `inner_optimizer` trains.
        inner_optimizer: whose steps are counted.
        outer_optimizer: one over all parameters, or one a fragment; SGD with Nesterov momentum is usual.
        sync_every: steps between two synchronisations of a fragment.
        fragment_sync_delay: steps between the beginning of a sum and its application; training goes on
            meanwhile. Less than `sync_every`.
        fragment_update_alpha: from 0 to 1; the local parameters become (1 - alpha) global + alpha local.
        group: the ranks to average over; None is the default group.
        codec: how outer gradients travel: "float32", "bfloat16", "int8", or a class like `OuterCodec`; over a
            NetStorm group also every other codec of `netstorm.compression`, by its name or as a mapping with
            `type` and parameters, or one for each pattern of parameters' names. These begin with the number
            of the fragment, as in "0.weight".
        state: in an elastic job, what else travels to ranks that join later, as `ElasticState` takes it.

    Raises:
        UsageError: a value is not allowed, a parameter is in two fragments, is trained outside of all, or has
            no outer optimizer; or there is no process group.
        Disagreement: on entering; ranks have different settings.
        NonFiniteUpdate: in `inner_optimizer.step()`, at all ranks; the average is not finite.
    """

    def __init__(
        self,
        model_fragments: list[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | list[Optimizer],
        sync_every: int,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        group: dist.ProcessGroup | None = None,
        codec: Descriptions | CodecFactory = "float32",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise UsageError(f"fragment_update_alpha={fragment_update_alpha}: it must be from 0 to 1")
        self._schedule = Schedule(
            fragments=len(model_fragments), sync_every=sync_every, delay=fragment_sync_delay
        )
        self._alpha = fragment_update_alpha
        parameters = trained_parameters(model_fragments, inner_optimizer)
        outer = outer_optimizers(parameters, inner_optimizer, outer_optimizer)
        ranks = ProcessGroupRanks.of(group)
        if isinstance(ranks, ElasticRanks) and fragment_sync_delay:
            raise UsageError(
                f"fragment_sync_delay={fragment_sync_delay} in an elastic job (NETSTORM_ELASTIC): a rank "
                "that joins later cannot take over sums that are under way; use 0"
            )
        codecs = codecs_of_vectors(codec, group or dist.group.WORLD)
        super().__init__(tuple(model_fragments), inner_optimizer, ranks, state)
        self._outer = list(dict.fromkeys(outer))
        self._fragments = [
            Fragment(
                name=name,
                parameters=members,
                outer_optimizer=optimizer,
                alpha=fragment_update_alpha,
                codec=codecs,
                ranks=ranks,
            )
            for (name, members), optimizer in zip(parameters.items(), outer, strict=True)
        ]
        self._lost: list[str] = []

    def sync(self) -> None:
        """Synchronise all fragments now, as after the last step; all ranks must call it at the same step."""
        self._end_sums()
        self._begin(self._fragments)
        self._advance(self._fragments)
        self._end_sums()

    def load_global_parameters(self) -> None:
        """Make the local parameters the global ones, which are the same at all ranks, as to save a model.

        What this rank has learnt since its last synchronisation is lost.
        """
        for fragment in self._fragments:
            fragment.write_global()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all outer state; saving it, the model and the inner optimizer saves the training.

        Each rank saves its own, because local parameters and residuals differ. All ranks must call it at the
        same step: it waits for the sums that are under way, and keeps them for the step that applies them.

        Raises:
            UsageError: an exception has left the context while sums were under way, which are lost.
        """
        self._refuse_if_lost()
        self._advance(self._fragments)
        return {
            "steps": self._steps,
            "started": self._started,
            "settings": dict(self._settings()),
            "fragments": [fragment.state() for fragment in self._fragments],
            "outer_optimizers": [optimizer.state_dict() for optimizer in self._outer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; load the model and the inner optimizer as well.

        Raises:
            UsageError: it was saved with other settings or another model.
        """
        differing = differences(state["settings"], self._settings())
        if differing:
            name, saved, mine = differing[0]
            raise UsageError(
                f"the checkpoint was saved with {name}={saved}, this DiLoCo has {mine}: they must be the same"
            )
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load(saved)
        for optimizer, saved in zip(self._outer, state["outer_optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._steps = int(state["steps"])
        self._started = bool(state["started"])
        self._lost = []

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins an elastic job later: not what codecs keep of this rank's."""
        state = self.state_dict()
        state["fragments"] = [
            {**fragment, "kept": [None] * len(fragment["kept"])} for fragment in state["fragments"]
        ]
        return state

    def _forget_uncounted(self) -> None:
        for fragment in self._fragments:
            fragment.forget()

    def _next_average(self, step: int) -> int:
        while not self._schedule.apply_at(step):
            step += 1
        return step

    def _period_ends(self) -> bool:
        return self._steps % self._schedule.sync_every == 0

    def _settings(self) -> Settings:
        return {
            "sync_every": self._schedule.sync_every,
            "fragment_sync_delay": self._schedule.delay,
            "fragment_update_alpha": self._alpha,
            "codec": self._fragments[0].codec_name,
            "model_fragments": [
                [f"{flat.size} x {flat.dtype}" for flat in fragment.flat] for fragment in self._fragments
            ],
            "outer optimizers": len(self._outer),
        }

    def _before_entering(self) -> None:
        self._refuse_if_lost()
        for fragment in self._fragments:
            for flat in fragment.flat:
                flat.check_unchanged(fragment.name)

    def _after_starting(self) -> None:
        for fragment in self._fragments:
            fragment.remember()

    def _after_step(self) -> None:
        # First the collectives, then the outer steps, which take time: those collectives overlap with these.
        self._advance(self._fragments)
        self._begin([self._fragments[number] for number in self._schedule.begin_at(self._steps)])
        for number in self._schedule.apply_at(self._steps):
            self._fragments[number].apply()

    def _begin(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            fragment.begin()
        if self._schedule.delay <= 1:  # no step lies between in which one collective could follow another
            self._advance(fragments)

    def _advance(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            fragment.advance()

    def _end_sums(self) -> None:
        for fragment in self._fragments:
            if fragment.under_way:
                fragment.apply()

    def _on_leaving(self, *, failed: bool) -> None:
        if not failed:
            self._end_sums()
            return
        # Other ranks may be gone, so nothing is awaited. A sum is lost then, and with it what codecs keep.
        self._lost += [fragment.name for fragment in self._fragments if fragment.under_way]
        for fragment in self._fragments:
            fragment.drop()

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise UsageError(
                f"an exception has left this DiLoCo while sums of {', '.join(self._lost)} were under way, and"
                " they are lost: go on from the last checkpoint (load_state_dict)"
            )

"""Training with local updates: ranks take many steps alone, and exchange what they have learnt now and then.

`LocalSGD` averages parameters every few steps; `DiLoCo` averages the change since the last time and gives it
to an outer optimizer, fragment by fragment, while training goes on. The names and their meaning are
torchft's. `HFA` averages within sites, and less often across them; `ESync` gives each rank as many steps as
let all be ready at once. All but `ESync` use the public interface of `torch.distributed` alone, so any
process group will do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from netstorm.errors import UsageError
from netstorm.frontends.torch.elastic import ElasticState, group_of_all_ranks
from netstorm.frontends.torch.gradient_codecs import Descriptions
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.outer_codecs import (
    CodecFactory,
    CodecOf,
    Encoded,
    OuterAverage,
    OuterCodec,
    OuterFloat32,
    OuterQuorum,
    codecs_of_vectors,
    copied,
)
from netstorm.frontends.torch.parameters import (
    FlatParameters,
    by_kind,
    everything_in,
    outer_optimizers,
    own_gradients,
    trained_parameters,
)
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.frontends.torch.ranks import (
    ElasticRanks,
    ProcessGroupRanks,
    Ranks,
    Settings,
    SiteAverages,
    Waitable,
    check_agreement,
    differences,
)
from netstorm.frontends.torch.site_mesh import LOCAL, site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce
from netstorm.kvstore.process.elastic import StepPacer
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.protocol.frames import bits_of
from netstorm.training.periods import (
    Average,
    FragmentSchedule,
    Paced,
    Periodic,
    Periods,
    StepSchedule,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "HFA",
    "DiLoCo",
    "ESync",
    "FragmentSchedule",
    "LocalSGD",
    "OuterCodec",
    "Ranks",
    "Waitable",
]


# What can go wrong with an average and is nobody's connection.


class NonFiniteUpdate(UsageError):
    """An average has NaN or infinite values: training has diverged at some rank. Raised at all ranks."""


# Local updates in elastic jobs: ranks die and come between two averages of all.
#
# Right after an average of all ranks they have the same parameters. A period begins then. So that is when the
# state is offered to ranks that join later: the parameters, and the optimizer's state of one rank. All offer
# theirs, since any of them may leave; optimizers differ, so a newcomer takes what one of them offers.


class _Progress:
    """A training, as `ElasticState` takes it: what a rank needs that joins later, besides its model and
    optimizer.
    """

    def __init__(self, training: StepHook) -> None:
        self.state_dict: Final = training.elastic_state
        self.load_state_dict: Final = training.take_elastic_state


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
        training: StepHook,
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
        self.is_newcomer: Final = self._member.runtime.node.needs_state
        self.ends = False
        self.state: Final = ElasticState(
            verify_every=0, **own, optimizer=optimizer, training=_Progress(training), **entries
        )

    @property
    def has_begun(self) -> bool:
        """Whether a first period of local steps has ended in an average."""
        return self.state.number > 0

    @property
    def hurries(self) -> bool:
        """Whether this rank has joined later and has not caught up: its parameters are in no average yet, so
        it goes on to the next one after each step.
        """
        return not self._member.runtime.node.live.contributes

    @property
    def counted(self) -> bool:
        """Whether this rank's values are in all averages of this period so far."""
        ranks = self._member.reduced_by
        return ranks is None or bool(ranks >> self._member.runtime.rank & 1)

    def begin(self, present: frozenset[int] | None = None) -> None:
        """Begin a period: all ranks have the same parameters. A newcomer's first one gives it those of the
        others.

        Args:
            present: the ranks that are in the job, if averages do not say so since some may be late; the same
                at all ranks.

        Raises:
            NetStormError: as of `ElasticState.step`.
        """
        self.ends = False
        if present:
            self._member.record_reduced(bits_of(present))
        fetches = self._member.runtime.node.needs_state
        self.state.step()
        for sampler in self.state.samplers if fetches else ():
            sampler.give_back()  # the others are in the first step of the period, and have taken its samples


# What `LocalSGD` and `DiLoCo` share: a context in which something follows each step of an optimizer.


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
        schedule: StepSchedule,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._modules = modules
        self._schedule = schedule
        self._optimizer = optimizer
        self._ranks = ranks
        self._elastic = (
            ElasticPeriods(self, modules, optimizer, state or {}) if isinstance(ranks, ElasticRanks) else None
        )
        self._hooks: list[RemovableHandle] = []
        self._started = False

    @property
    def steps(self) -> int:
        """How many steps this rank has taken; a rank that joins an elastic job later skips some."""
        return self._schedule.steps

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
        self._go_on(taken=1, hurries=self._elastic is not None and self._elastic.hurries)

    def _go_on(self, *, taken: int, hurries: bool) -> None:
        """Go on to the next step, or to the next average, of which this rank has `taken` so many steps; the
        others take all.
        """
        elastic, before = self._elastic, self.steps
        self._after_step(self._schedule.next_step(hurries=hurries))
        if elastic is not None:
            for sampler in elastic.state.samplers:
                sampler.skip(self.steps - before - taken)
            elastic.ends = self._schedule.is_averaged
            if not elastic.counted:
                self._forget_uncounted()

    def _before_optimizer(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._elastic is not None and self._elastic.ends:
            self._elastic.begin(self._present())

    def _present(self) -> frozenset[int] | None:
        """Return the ranks that are in the job, if averages may be without some of them."""
        return None

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins an elastic job later, besides model and optimizer."""
        return self.state_dict()

    def take_elastic_state(self, state: dict[str, Any]) -> None:
        """Go on from what another rank has returned."""
        self.load_state_dict(state)

    def _progress(self) -> Settings:
        """Return how far this rank is, which all ranks must agree on, too."""
        return {"the number of steps so far": self.steps}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return how far the training is, and what it keeps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""

    def _forget_uncounted(self) -> None:  # noqa: B027 -- most have nothing to do
        """Forget what is kept of this rank's steps, none of which has counted: it has just joined."""

    @abstractmethod
    def _settings(self) -> Settings:
        """Return what all ranks must agree on."""

    @abstractmethod
    def _after_step(self, average: Average) -> None:
        """Do what is due after the last step."""

    @abstractmethod
    def _before_entering(self) -> None:
        """Refuse to be entered, if there is a reason."""

    def _after_starting(self) -> None:  # noqa: B027 -- most have nothing to do
        """Take note of the parameters, which are now the same at all ranks."""

    def _on_leaving(self, *, failed: bool) -> None:  # noqa: B027 -- most have nothing to do
        """End what is under way; `failed` says that an exception leaves the context."""


# DiLoCo: an outer optimizer over what ranks have learnt alone (arXiv 2311.08105; streaming: 2501.18512).


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
        quorum: a sum ends once so many ranks are in it (all, if an elastic job has fewer), and `grace` is
            over; None: it waits for all. What a late rank has learnt is added to its next sum. That rank
            leaves out local steps until it is with the others again. Over a NetStorm group, with
            `codec="float32"`.
        grace: seconds, from a sum's first values on, in which all ranks are waited for.
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
        quorum: int | None = None,
        grace: float = 1.0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise UsageError(f"fragment_update_alpha={fragment_update_alpha}: it must be from 0 to 1")
        self._plan = FragmentSchedule(
            fragments=len(model_fragments), sync_every=sync_every, delay=fragment_sync_delay
        )
        self._alpha = fragment_update_alpha
        parameters = trained_parameters(model_fragments, inner_optimizer)
        outer = outer_optimizers(parameters, inner_optimizer, outer_optimizer)
        ranks = ProcessGroupRanks.of(group)
        if quorum is None:
            codecs = codecs_of_vectors(codec, group or dist.group.WORLD)
        else:
            codecs = _quorum_codecs(quorum, grace, codec, group or dist.group.WORLD)
        super().__init__(
            tuple(model_fragments), inner_optimizer, ranks, Periodic("DiLoCo", self._plan), state
        )
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
            "steps": self.steps,
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
        self._schedule.go_on_at(0, int(state["steps"]))
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

    def _settings(self) -> Settings:
        return {
            "sync_every": self._plan.sync_every,
            "fragment_sync_delay": self._plan.delay,
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

    def _after_optimizer(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        super()._after_optimizer(optimizer, arguments, named)
        while any(fragment.is_behind for fragment in self._fragments):
            self._before_optimizer(optimizer, arguments, named)
            self._go_on(taken=0, hurries=True)

    def _present(self) -> frozenset[int] | None:
        full = (ranks for one in self._fragments for ranks in one.recent if len(ranks) == ranks.maxlen)
        recent = [set().union(*ranks) for ranks in full]  # of fewer sums somebody may be in none
        return frozenset(set.intersection(*recent)) if recent else None

    def _after_step(self, average: Average) -> None:
        # First the collectives, then the outer steps, which take time: those collectives overlap with these.
        self._advance(self._fragments)
        self._begin([self._fragments[number] for number in self._plan.begin_at(self.steps)])
        for number in self._plan.apply_at(self.steps):
            self._fragments[number].apply()

    def _begin(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            fragment.begin()
        if self._plan.delay <= 1:  # no step lies between in which one collective could follow another
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


def _quorum_codecs(quorum: int, grace: float, codec: object, group: object) -> CodecOf:
    """Return what makes the codec of each vector.

    Raises:
        UsageError: a value is not allowed, or there are no such sums here.
    """
    if not isinstance(group, NetStormProcessGroup):
        raise UsageError(
            f"quorum={quorum} over a group that is none of NetStorm's, which waits for all ranks"
        )
    if not 1 <= quorum <= group.size():
        raise UsageError(f"quorum={quorum}: expected 1 to {group.size()} ranks")
    if not 0.0 <= grace < float("inf"):
        raise UsageError(f"grace={grace}: expected seconds, 0 or more")
    if codec != "float32":
        raise UsageError(f'codec={codec!r} with quorum={quorum}: only "float32" can be late')
    group.member.runtime.refuse_if_reproducible("quorum")

    def make(flat: FlatParameters, _names: Sequence[str]) -> OuterQuorum:
        return OuterQuorum(group, flat.size * accumulator_type(flat.dtype).itemsize, quorum, grace)

    return make


# One fragment of a model: its global parameters, and the average that brings them forward.


class Fragment:
    """Global parameters of some of a model's parameters, one vector for each type and device.

    Global parameters have the same bits at all ranks. Local ones are the model's, which the rank trains.

    Args:
        name: for messages.
        parameters: what is synchronised, by a name that no other fragment has.
        outer_optimizer: brings the global parameters forward; it is one over the model's own parameters.
        alpha: weight of the local parameters when an update is applied.
        codec: makes what averages one vector.
        ranks: whom to average over.
    """

    def __init__(
        self,
        *,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        outer_optimizer: Optimizer,
        alpha: float,
        codec: CodecOf,
        ranks: Ranks,
    ) -> None:
        self.name = name
        self.flat = by_kind(parameters.values())
        self._outer = outer_optimizer
        self._alpha = alpha
        self._ranks = ranks
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._codecs = [codec(flat, [names[id(each)] for each in flat.parameters]) for flat in self.flat]
        self._global: list[torch.Tensor] = []
        self.remember()
        self._exchanges: list[OuterAverage] = []
        self._averages: list[torch.Tensor] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a sum has begun and has not been applied."""
        return bool(self._exchanges) or self._averages is not None

    @property
    def is_behind(self) -> bool:
        """Whether the next sum has ended without this rank."""
        return any(isinstance(codec, OuterQuorum) and codec.is_behind for codec in self._codecs)

    @property
    def recent(self) -> list[deque[frozenset[int]]]:
        """The ranks in the last sums of each vector, of those that some may be late for."""
        return [codec.recent for codec in self._codecs if isinstance(codec, OuterQuorum)]

    @property
    def codec_name(self) -> str:
        """What ranks compare."""
        return self._codecs[0].name

    def remember(self) -> None:
        """Make the local parameters the global ones; they must be the same at all ranks."""
        self._global = [flat.read() for flat in self.flat]

    def write_global(self) -> None:
        """Make the global parameters the local ones."""
        for flat, values in zip(self.flat, self._global, strict=True):
            flat.write(values)

    def begin(self) -> None:
        """Begin to average the outer gradient: global minus local parameters, as they are now."""
        for flat, start, codec in zip(self.flat, self._global, self._codecs, strict=True):
            wide = accumulator_type(flat.dtype)
            update = flat.read().to(wide).neg_().add_(start)  # in place: new memory costs more than sums
            self._exchanges.append(OuterAverage(codec, update, self._ranks))

    def advance(self) -> None:
        """Begin the average's next collective, if its codec takes several."""
        for exchange in self._exchanges:
            exchange.advance()

    def apply(self) -> None:
        """Wait for the average, take an outer step, and merge it into the local parameters.

        Raises:
            NonFiniteUpdate: the average is not finite. Neither global nor local parameters have changed.
        """
        averages = self._finished()
        self.drop()
        check_finite(averages, f"the outer gradient of {self.name}", self.flat)
        trained = [flat.read() for flat in self.flat] if self._alpha else []
        self.write_global()
        with own_gradients(self._outer):
            for flat, average in zip(self.flat, averages, strict=True):
                flat.set_gradients(average)
            self._outer.step()
        self.remember()
        if trained:
            for flat, values, local in zip(self.flat, self._global, trained, strict=True):
                flat.write(torch.lerp(values, local, self._alpha))

    def forget(self) -> None:
        """Forget what codecs have not sent of this rank's."""
        for codec in self._codecs:
            if isinstance(codec, Encoded):
                codec.forget()

    def drop(self) -> None:
        """Forget the sum that is under way."""
        self._exchanges, self._averages = [], None

    def state(self) -> dict[str, Any]:
        """Return copies of the outer state; a sum that is under way is awaited and kept for its time."""
        averages = self._finished() if self.under_way else None
        return {
            "global": [values.clone() for values in self._global],
            "kept": [copied(codec.kept()) for codec in self._codecs],
            "averages": None if averages is None else [average.clone() for average in averages],
            "recent": [[sorted(ranks) for ranks in recent] for recent in self.recent],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.drop()
        self._global = self._like(state["global"])
        for flat, codec, kept in zip(self.flat, self._codecs, state["kept"], strict=True):
            codec.keep(copied(kept, flat.device))
        for recent, ranks in zip(self.recent, state.get("recent", ()), strict=False):
            recent.clear()
            recent.extend(map(frozenset, ranks))
        if state["averages"] is not None:
            self._averages = [
                average.to(flat.device, copy=True)
                for flat, average in zip(self.flat, state["averages"], strict=True)
            ]

    def _finished(self) -> list[torch.Tensor]:
        if self._averages is None:
            # In two turns: what can begin begins, in one order at all ranks, and then all is awaited.
            self.advance()
            self._averages = [exchange.finish() for exchange in self._exchanges]
        return self._averages

    def _like(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        forms = [(values.numel(), values.dtype) for values in saved]
        expected = [(flat.size, flat.dtype) for flat in self.flat]
        if forms != expected:
            raise UsageError(
                f"the checkpoint's {self.name} has (values, type) {forms}, the model's has {expected}:"
                " load a checkpoint of the same model and fragments"
            )
        return [values.to(flat.device, copy=True) for flat, values in zip(self.flat, saved, strict=True)]


def accumulator_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values of `dtype` are summed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def check_finite(averages: Sequence[torch.Tensor], what: str, flat: Sequence[FlatParameters]) -> None:
    """Raise `NonFiniteUpdate` if an average is not finite.

    All ranks have the same average, so all raise. The message says whether this rank's values are the cause.
    """
    if all(bool(torch.isfinite(average).all()) for average in averages):
        return
    own = sum(int((~torch.isfinite(part.read())).sum()) for part in flat)
    cause = (
        f"{own} of this rank's parameters are not finite" if own else "this rank's own parameters are finite"
    )
    raise NonFiniteUpdate(
        f"{what} has NaN or infinite values ({cause}): training has diverged at some rank; lower the learning"
        " rate or clip gradients, and go on from a checkpoint"
    )


# Local SGD: ranks train alone, and every few steps average their parameters (Stich, arXiv 1805.09767).


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
        self._begin(model, optimizer, Periods.every(sync_every), group, state)

    def _begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        periods: Periods,
        group: dist.ProcessGroup | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._periods = periods
        schedule = Periodic(type(self).__name__, periods)
        super().__init__([model], optimizer, ProcessGroupRanks.of(group), schedule, state)
        self._flat = by_kind(parameter for parameter in model.parameters() if parameter.requires_grad)
        if not self._flat:
            raise UsageError(f"the model ({type(model).__name__}) has no parameters that need a gradient")

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by, of the site or of all."""
        return self._schedule.averages

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters: the last step was followed by an average of all."""
        return self._schedule.is_averaged

    def sync(self) -> None:
        """Average now; all ranks must call it at the same step."""
        self._average(self._ranks)

    def _average(self, ranks: Ranks) -> None:
        exchanges = [OuterAverage(OuterFloat32(), values, ranks) for values in self._wide_values()]
        self._take([exchange.finish() for exchange in exchanges])

    def _wide_values(self) -> list[torch.Tensor]:
        """Return this rank's parameters in the types that they are summed in."""
        return [flat.read().to(accumulator_type(flat.dtype)) for flat in self._flat]

    def _take(self, averages: Sequence[torch.Tensor]) -> None:
        check_finite(averages, "the average of the model", self._flat)
        for flat, average in zip(self._flat, averages, strict=True):
            flat.write(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the settings; parameters are in the model's own `state_dict()`."""
        return {"steps": self.steps, "started": self._started, "settings": dict(self._settings())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, saved with the same settings; load the model and the optimizer as well."""
        differing = differences(state["settings"], self._settings())
        if differing:
            name, saved, mine = differing[0]
            raise UsageError(f"the checkpoint was saved with {name}={saved}, but this LocalSGD has {mine}")
        self._schedule.go_on_at(int(state.get("averages", 0)), int(state["steps"]))
        self._started = bool(state["started"])

    def _settings(self) -> Settings:
        return {
            "sync_every": self._periods.k1,
            "the model's parameters": [f"{flat.size} x {flat.dtype}" for flat in self._flat],
        }

    def _before_entering(self) -> None:
        for flat in self._flat:
            flat.check_unchanged("the model")

    def _after_step(self, average: Average) -> None:
        if average is Average.ALL:
            self.sync()


# Hierarchical frequency aggregation: averages within a site often, and across sites seldom (GeoMX).


class HFA(LocalSGD):
    """Averages parameters over the ranks of a site every `k1` steps, and over all at every `k2`-th average.

    ```python
    with HFA(model, optimizer, k1=20, k2=10):
        for batch in batches:
            ...
            optimizer.step()  # every 20th one averages in the site, every 200th one over all
    ```

    A site's average does not leave it. One over all is summed inside sites first, so that it crosses the WAN
    once a site. See `LocalSGD` for what else holds.

    Args:
        model: as of `LocalSGD`, like `optimizer` and `state`.
        optimizer: whose steps are counted.
        k1: steps between averages.
        k2: averages of a site from one over all ranks to the next, which is one of them.
        mesh: of sites; None: `site_mesh()`, whose sites are those of NETSTORM_SITE. Elastic jobs have none:
            an average over all goes along the job's trees there, and a rank that has joined later is in no
            average of a site.

    Raises:
        UsageError: as `LocalSGD`, like its other errors; or there is no mesh of sites.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        k1: int,
        k2: int,
        *,
        mesh: DeviceMesh | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._begin(model, optimizer, Periods(k1, k2), None, state)
        self._of_site: ProcessGroupRanks | SiteAverages
        if self._elastic is not None:
            if mesh is not None:
                raise UsageError(
                    "mesh= in an elastic job (NETSTORM_ELASTIC): leave it out, ranks come and go"
                )
            vectors = [(flat.size, accumulator_type(flat.dtype)) for flat in self._flat]
            member = group_of_all_ranks().member
            self._of_site = SiteAverages(member, vectors, is_newcomer=self._elastic.is_newcomer)
            return
        self._mesh = site_mesh() if mesh is None else mesh
        if LOCAL not in (self._mesh.mesh_dim_names or ()):
            raise UsageError(
                f"a mesh with the dimensions {self._mesh.mesh_dim_names}: expected one of site_mesh()"
            )
        self._of_site = ProcessGroupRanks(self._mesh.get_group(LOCAL))

    def sync_site(self) -> None:
        """Average over the ranks of the site now; all of them must call it at the same step."""
        if isinstance(self._of_site, ProcessGroupRanks):
            self._average(self._of_site)
            return
        averages = self._wide_values()
        self._of_site.average(averages)
        self._take(averages)

    def sync(self) -> None:
        """Average over all ranks now; all must call it at the same step."""
        if self._elastic is not None:
            super().sync()
            return
        averages = self._wide_values()
        for average in averages:
            hierarchical_all_reduce(average, self._mesh, dist.ReduceOp.AVG)
        self._take(averages)

    def _settings(self) -> Settings:
        return {**super()._settings(), "k2": self._periods.k2}

    def _after_step(self, average: Average) -> None:
        super()._after_step(average)
        if average is Average.SITE:
            self.sync_site()


# ESync: each rank takes as many steps between averages as fit into the time of the slowest.


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
        model: as of `LocalSGD`, like `optimizer` and `state`.
        optimizer: whose steps are counted.
        least_steps: steps of the slowest rank between averages.
        most_steps: bound for all ranks: after many steps alone parameters are far apart.

    Raises:
        UsageError: as `LocalSGD`, like its other errors; or the default process group is not NetStorm's.
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
        if self._paces:
            self._schedule = Paced("ESync", self._pacer)
        self._rounds = 0
        """Reported to the state server: those of this process, and of the job before it joined."""

    @property
    def round_steps(self) -> int:
        """The number of steps of the present round; waits until it is known."""
        return self._pacer.steps()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps and averages, and the settings; call it right after an average.

        Raises:
            UsageError: this rank has taken steps since the last one: others have taken another number.
        """
        taken = self._schedule.taken
        if taken:
            raise UsageError(f"{taken} steps after an average: save right after one, when ranks agree")
        return {**super().state_dict(), "averages": self.averages}

    def elastic_state(self) -> dict[str, Any]:
        """Return what a rank needs that joins an elastic job later."""
        return {**super().state_dict(), "averages": self.averages, "rounds": self._rounds}

    def take_elastic_state(self, state: dict[str, Any]) -> None:
        """Go on from what another rank has returned."""
        self.load_state_dict(state)
        self._rounds = int(state["rounds"])

    def _settings(self) -> Settings:
        least, most = self._bounds
        return {**super()._settings(), "least_steps": least, "most_steps": most}

    def _progress(self) -> Settings:
        return {"the number of averages so far": self.averages}

    def _after_step(self, average: Average) -> None:
        if average is Average.NONE:
            return
        if self._paces:
            if any(flat.device.type == "cuda" for flat in self._flat):
                torch.cuda.synchronize()  # steps are queued there; what they take is what others wait for
            self._pacer.exchange_begins(self._rounds)
        self.sync()
        if self._paces:
            self._pacer.exchange_ends()
            self._rounds += 1

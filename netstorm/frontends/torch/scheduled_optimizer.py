"""Priority by need of the next forward pass (P3, Jayarajan et al., MLSys 2019; ByteScheduler, SOSP 2019).

DDP's backward pass ends when all gradients have been summed. Here it ends at once. Each module waits for its
own sums before its next forward pass, and its parameters are updated then. Sums of first layers go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.internals import (
    call_at_end_of_backward,
    is_in_backward,
    mark_stepped,
    post_accumulate_hooks,
)
from netstorm.frontends.torch.member import never_compiled
from netstorm.frontends.torch.parameters import FlatParameters, by_kind, everything_in, optimised
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.frontends.torch.ranks import ProcessGroupRanks, Waitable

__all__ = ["ScheduledOptimizer"]


_WHOLE: Final[tuple[type[nn.Module], ...]] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""PyTorch's modules that use their children's parameters without calling these children."""


class ScheduledOptimizer:
    """Trains a plain module on all ranks, as DDP does, and overlaps sums with the next forward pass, too.

    ```python
    training = ScheduledOptimizer(model, torch.optim.AdamW(model.parameters()))
    for batch in batches:
        training.zero_grad()
        loss(model, batch).backward()  # begins sums, and returns at once
        training.step()  # returns at once
    ```

    Modules are taken in the order in which the model registers them, which is to be that of their use: the
    first ones have the highest priority. A module has one sum; small ones are joined with the next.
    A parameter without a gradient at some ranks counts as one with zeros there; one without a gradient at all
    ranks is left alone, as under DDP with `find_unused_parameters=True`. Gradients belong to the sums once
    they have begun, so `parameter.grad` is None after a backward pass.

    After `step`, parameters are not new before their module is called. Call `synchronize` before anything
    else reads them. The model's and the optimizer's `state_dict` do so by themselves.

    Args:
        model: whose gradients are averaged. All ranks begin with the first rank's parameters and buffers.
        optimizer: over the model's parameters; one that updates each parameter by itself.
        group: the ranks to average over; None is the default group. Only NetStorm's groups have priorities.
        least_bytes: of the parameters that are waited for together.
        whole: classes of modules that use their children's parameters without calling these children, beside
            PyTorch's own.

    Raises:
        UsageError: a value is not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        least_bytes: int = 2**16,
        whole: Sequence[type[nn.Module]] = (),
    ) -> None:
        _check(model, optimizer, group)
        kinds = (*_WHOLE, *whole)
        self.optimizer: Final = optimizer
        self._ranks: Final = ProcessGroupRanks(group)
        self._group: Final = group or dist.group.WORLD
        self._units: Final = units_of(model, kinds, least_bytes)
        self._of: Final = {parameter: unit for unit in self._units for parameter in unit.parameters}
        self._called: Final[set[torch.Tensor]] = set()
        """Parameters whose modules have been called since the last step."""
        self._begun = 0
        """How many units' sums of this backward pass have begun, from the last unit on."""
        self._ends = False
        """Whether the end of this backward pass will call."""
        self._summing = True
        self._parameters: Final = len(optimised(optimizer))
        self._taking = False
        """Whether the optimizer's step is called from here."""
        for flat in everything_in([model]):
            values = flat.read()
            self._ranks.take_from_first(values)
            flat.write(values)
        self._hooks: Final = self._registered(model, kinds)

    # ------------------------------------------------------------------------------ what the loop calls

    def step(self) -> None:
        """Have each module updated before it is used next. Learning rates are those of this moment.

        Raises:
            UsageError: no backward pass has begun all sums since the last step; or the optimizer has got
                further parameters.
        """
        if self._begun < len(self._units):
            raise UsageError(
                "step() without a backward pass whose gradients are summed (see no_sync); after one that has "
                "failed, zero_grad() comes first"
            )
        groups = self.optimizer.param_groups
        if len(optimised(self.optimizer)) != self._parameters:
            raise UsageError("the optimizer has got other parameters: close() this, and make a new one")
        settings = [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value  # schedulers fill it anew
                for name, value in group.items()
                if name != "params"
            }
            for group in groups
        ]
        for unit in self._units:
            unit.settings = settings
        self._called.clear()
        self._begun, self._ends = 0, False
        mark_stepped(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; wait for the sums of a backward pass whose step all ranks leave out, too."""
        self._drop()
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backward passes in this context; the next one outside sums them all."""
        before, self._summing = self._summing, False
        try:
            yield
        finally:
            self._summing = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the averages by their total norm, and return it. It waits for all sums: nothing overlaps then.

        Call it between the backward pass and `step`; PyTorch's own finds no gradients.
        """
        if self._begun < len(self._units):
            raise UsageError("clip_grad_norm_ is to be called between the backward pass and step()")
        try:
            for unit in self._units:
                unit.give_gradients()
            return nn.utils.clip_grad_norm_(list(self._of), max_norm, norm_type, error_if_nonfinite)
        finally:
            for parameter in self._of:
                parameter.grad = None

    def synchronize(self) -> None:
        """Wait for all sums whose step has been taken, and update all parameters.

        Called before each forward pass, it lets a model use parameters without calling their modules.
        """
        self._take(self._units)
        self._called.update(self._of)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state after all steps."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; load the model's as well. A backward pass without a step is forgotten."""
        self._drop()
        self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """Update all parameters, and leave the model and the optimizer as plain ones. Twice does no harm."""
        self._drop()
        self.synchronize()
        self._hooks.close()

    # ------------------------------------------------------------------------------------- what hooks do

    def _registered(self, model: nn.Module, whole: tuple[type[nn.Module], ...]) -> ExitStack:
        """Register all hooks; what is returned removes them."""
        hooks = ExitStack()

        def synchronize(*_: Any) -> None:
            self.synchronize()

        for parameter in self._of:
            hooks.callback(parameter.register_post_accumulate_grad_hook(self._after_gradient).remove)  # type: ignore[no-untyped-call]
        for module in model.modules():
            own = [parameter for parameter in used_by(module, whole) if parameter in self._of]
            if own:
                # First of all hooks: others compute from parameters, as spectral_norm's.
                before = self._before_forward(own)
                hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            hooks.callback(module.register_state_dict_pre_hook(synchronize).remove)  # type: ignore[no-untyped-call]
            hooks.callback(module.register_load_state_dict_pre_hook(synchronize).remove)  # type: ignore[no-untyped-call]
        optimizer = self.optimizer
        hooks.callback(optimizer.register_state_dict_pre_hook(synchronize).remove)
        hooks.callback(optimizer.register_load_state_dict_pre_hook(synchronize).remove)
        hooks.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
        return hooks

    def _before_forward(self, own: Sequence[nn.Parameter]) -> Callable[[nn.Module, Any], None]:
        """Return what is called before a module that uses these parameters."""
        needed = list(dict.fromkeys(self._of[parameter] for parameter in own))

        @never_compiled
        def before(_module: nn.Module, _inputs: Any) -> None:
            self._take(needed)
            self._called.update(own)
            if not is_in_backward():
                self._ends = False  # a backward pass that has failed never says so
            elif self._summing:  # checkpointing: an inner backward pass follows, whose end is not the end
                self._call_at_end()

        return before

    def _before_optimizer(self, *_: Any) -> None:
        if not self._taking:
            raise UsageError("optimizer.step() finds no gradients: call the step() of ScheduledOptimizer")

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        unit = self._of[parameter]  # type: ignore[index]
        if parameter not in self._called:
            raise UsageError(
                f"a parameter of module {unit.name!r} has a gradient, but its module has not been called "
                "since the last step: name the class whose code uses it in whole=, or call synchronize() "
                "before each forward pass"
            )
        if not self._summing:
            return
        if unit.sums or parameter not in unit.missing or self._begun == len(self._units):
            raise UsageError(
                "a second backward pass before step(): all but the last belong into no_sync(); zero_grad() "
                "forgets one that has failed"
            )
        self._call_at_end()
        unit.missing.discard(parameter)
        self._begin_ready()

    def _call_at_end(self) -> None:
        """Have `_end_backward` called at the end of the backward pass that is under way."""
        if not self._ends:
            self._ends = True
            call_at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._ends:
            self._ends = False
            self._begin_ready(all_of_them=True)

    def _begin_ready(self, *, all_of_them: bool = False) -> None:
        """Begin sums, in the same order at all ranks: that of their units, backwards."""
        while self._begun < len(self._units):
            place = len(self._units) - 1 - self._begun
            unit = self._units[place]
            if unit.missing and not all_of_them:
                return
            self._begin(unit, -place)
            self._begun += 1

    def _begin(self, unit: ParameterUnit, priority: int) -> None:
        self._take([unit])  # its modules have not been called since the last step
        for gradients in unit.contributions(self._ranks.size):
            work: Waitable
            if isinstance(self._group, NetStormProcessGroup):
                work = self._group.allreduce_with_priority(gradients, priority)
            else:
                work = self._ranks.begin_sum(gradients)
            unit.sums.append((gradients, work))

    def _drop(self) -> None:
        """Forget a backward pass without a step. Its sums go on at other ranks, so all of them begin."""
        self._ends = False
        if not self._begun and all(len(unit.missing) == len(unit.parameters) for unit in self._units):
            return
        self._begin_ready(all_of_them=True)
        for unit in self._units:
            unit.forget()
        self._begun = 0

    def _take(self, units: Sequence[ParameterUnit]) -> None:
        """Wait for the sums of units, and take the step for their parameters."""
        for unit in units:
            if unit.settings is None:
                continue
            with torch.inference_mode(False):  # the optimizer makes its state, which lasts
                unit.give_gradients()
                settings, unit.settings = unit.settings, None
                try:
                    self._update(unit, settings)
                finally:
                    unit.sums.clear()
                    for parameter in unit.parameters:
                        parameter.grad = None

    def _update(self, unit: ParameterUnit, settings: list[dict[str, Any]]) -> None:
        """Have the optimizer take a step for a unit's parameters alone."""
        groups, members = self.optimizer.param_groups, set(unit.parameters)
        chosen = [
            ({**then, "params": [parameter for parameter in group["params"] if parameter in members]}, then)
            for group, then in zip(groups, settings, strict=True)
        ]
        chosen = [(group, then) for group, then in chosen if group["params"]]
        with ExitStack() as stack:
            for kind in {flat.device.type for flat in unit.flat}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            self._taking = True
            try:
                self.optimizer.param_groups = [group for group, _ in chosen]
                self.optimizer.step()
            finally:
                self.optimizer.param_groups = groups
                self._taking = False
        for group, then in chosen:
            for name, value in group.items():
                if name != "params" and (name not in then or not _same(value, then[name])):
                    raise UsageError(
                        f"{type(self.optimizer).__name__} changes {name!r} of its parameter groups with each "
                        "step, so it needs all gradients at once: use DistributedDataParallel"
                    )


def _same(value: Any, before: Any) -> bool:
    return value is before or bool(value == before)


def _check(model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
    if isinstance(optimizer, LBFGS):
        raise UsageError("LBFGS needs all gradients at once: use DistributedDataParallel")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or "FullySharded" in type(module).__name__:
            raise UsageError(f"a model in {type(module).__name__}: ScheduledOptimizer takes its place")
    known = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not known:
        raise UsageError(f"the model ({type(model).__name__}) has no parameters that need a gradient")
    if any(isinstance(parameter, DTensor) for parameter in known):
        raise UsageError("sharded parameters (DTensor): ScheduledOptimizer averages whole ones alone")
    if known != {parameter for parameter in optimised(optimizer) if parameter.requires_grad}:
        raise UsageError(
            "ScheduledOptimizer: expected an optimizer of exactly the model's trained parameters"
        )
    for parameter in known:
        hooks = post_accumulate_hooks(parameter)
        if any(isinstance(getattr(hook, "__self__", None), ScheduledOptimizer) for hook in hooks):
            raise UsageError("the model has a ScheduledOptimizer already: close() that one first")
    ranks = group or dist.group.WORLD
    if isinstance(ranks, NetStormProcessGroup) and ranks.member.runtime.settings.elastic:
        raise UsageError(
            "ScheduledOptimizer in an elastic job (NETSTORM_ELASTIC): modules take steps at different times, "
            "and a rank that joins begins with the state of one moment; use elastic.data_parallel"
        )


# A model's parameters, grouped by the modules that use them: `ScheduledOptimizer` waits for each group.


@dataclass(slots=True, eq=False)
class ParameterUnit:
    """Parameters that are waited for together.

    Behind the gradients of a vector travels one element for each of its parameters, which says whether there
    was a gradient. An optimizer skips a parameter that has had one at no rank, as under DDP.
    """

    name: str
    """Names of its modules."""
    parameters: list[nn.Parameter]
    flat: list[FlatParameters]
    missing: set[nn.Parameter] = field(default_factory=set)
    """Those whose gradients have not been computed."""
    sums: list[tuple[torch.Tensor, Waitable]] = field(default_factory=list)
    """What has begun, for each of `flat`."""
    settings: list[dict[str, Any]] | None = None
    """Hyper-parameters of the optimizer's groups at the step that is to be taken; None: no step yet."""

    def contributions(self, ranks: int) -> list[torch.Tensor]:
        """Return what this rank adds to the averages over `ranks`, for each of `flat`. Gradients are taken
        away from the parameters.

        Raises:
            UsageError: a gradient is sparse.
        """
        vectors = []
        for flat in self.flat:
            gradients = [parameter.grad for parameter in flat.parameters]
            for gradient in gradients:
                if gradient is not None and gradient.layout is not torch.strided:
                    raise UsageError(
                        f"module {self.name!r} has a sparse gradient, which ScheduledOptimizer does not sum: "
                        "make it with sparse=False, or use DistributedDataParallel"
                    )
            given = torch.tensor(
                [gradient is not None for gradient in gradients], dtype=flat.dtype, device=flat.device
            )
            parts = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(flat.parameters, gradients, strict=True)
            ]
            vectors.append(FlatParameters([*parts, given]).read().mul_(1.0 / ranks))
        for parameter in self.parameters:
            parameter.grad = None
        self.missing.update(self.parameters)
        return vectors

    def give_gradients(self) -> None:
        """Wait for the averages, and let them be the gradients."""
        for flat, (average, work) in zip(self.flat, self.sums, strict=True):
            work.wait()
            flat.set_gradients(average[: flat.size])
            for parameter, given in zip(flat.parameters, average[flat.size :].tolist(), strict=True):
                if not given:
                    parameter.grad = None

    def forget(self) -> None:
        """Wait for the sums, and drop them."""
        for _, work in self.sums:
            work.wait()
        self.sums.clear()


def used_by(module: nn.Module, whole: tuple[type[nn.Module], ...]) -> list[nn.Parameter]:
    """Return the parameters that a module's own code uses, without calling the module that has them.

    These are its own ones, and those of modules that cannot be called, as `nn.ParameterList`.

    Args:
        module: a part of a model.
        whole: classes of modules that use all their children's parameters themselves.
    """
    if isinstance(module, whole):
        return list(module.parameters())
    parameters = list(module.parameters(recurse=False))
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            parameters += used_by(child, whole)
    return parameters


def units_of(model: nn.Module, whole: tuple[type[nn.Module], ...], least_bytes: int) -> list[ParameterUnit]:
    """Return the trained parameters, module by module, each in the first one that uses it.

    Args:
        model: its modules are taken in the order of their registration.
        whole: see `used_by`.
        least_bytes: modules with fewer are joined with the next ones.
    """
    units: list[ParameterUnit] = []
    seen: set[nn.Parameter] = set()
    names: list[str] = []
    parameters: list[nn.Parameter] = []

    def close() -> None:
        if parameters:
            units.append(
                ParameterUnit(", ".join(names), list(parameters), by_kind(parameters), set(parameters))
            )
        names.clear()
        parameters.clear()

    for name, module in model.named_modules():
        own = [
            parameter
            for parameter in dict.fromkeys(used_by(module, whole))
            if parameter.requires_grad and parameter not in seen
        ]
        if own:
            seen.update(own)
            names.append(name or type(module).__name__)
            parameters.extend(own)
            if sum(parameter.numel() * parameter.element_size() for parameter in parameters) >= least_bytes:
                close()
    close()
    return units

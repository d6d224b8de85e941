"""A model's parameters, grouped by the modules that use them: `ScheduledOptimizer` waits for each group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.parameters import FlatParameters, by_kind
from netstorm.frontends.torch.local_updates.ranks import Waitable

__all__ = ["Unit", "units_of", "used_by"]


@dataclass(slots=True, eq=False)
class Unit:
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
            for one in gradients:
                if one is not None and one.layout is not torch.strided:
                    raise UsageError(
                        f"module {self.name!r} has a sparse gradient, which ScheduledOptimizer does not sum: "
                        "make it with sparse=False, or use DistributedDataParallel"
                    )
            given = torch.tensor([one is not None for one in gradients], dtype=flat.dtype, device=flat.device)
            parts = [
                torch.zeros_like(parameter) if one is None else one
                for parameter, one in zip(flat.parameters, gradients, strict=True)
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
    found = list(module.parameters(recurse=False))
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            found += used_by(child, whole)
    return found


def units_of(model: nn.Module, whole: tuple[type[nn.Module], ...], least_bytes: int) -> list[Unit]:
    """Return the trained parameters, module by module, each in the first one that uses it.

    Args:
        model: its modules are taken in the order of their registration.
        whole: see `used_by`.
        least_bytes: modules with fewer are joined with the next ones.
    """
    units: list[Unit] = []
    seen: set[nn.Parameter] = set()
    names: list[str] = []
    parameters: list[nn.Parameter] = []

    def close() -> None:
        if parameters:
            units.append(Unit(", ".join(names), list(parameters), by_kind(parameters), set(parameters)))
        names.clear()
        parameters.clear()

    for name, module in model.named_modules():
        own = [one for one in dict.fromkeys(used_by(module, whole)) if one.requires_grad and one not in seen]
        if own:
            seen.update(own)
            names.append(name or type(module).__name__)
            parameters.extend(own)
            if sum(one.numel() * one.element_size() for one in parameters) >= least_bytes:
                close()
    close()
    return units

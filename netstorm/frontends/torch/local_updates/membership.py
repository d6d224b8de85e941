"""Which parameters belong to which fragment and outer optimizer: what could go wrong silently is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.parameters import optimised

__all__ = ["outer_optimizers", "trained_parameters"]


def trained_parameters(
    fragments: Sequence[nn.Module], inner_optimizer: Optimizer
) -> dict[str, dict[str, nn.Parameter]]:
    """Return what is synchronised, by a name for each fragment, and one for each parameter.

    That is what needs a gradient or is the inner optimizer's (it may need one later).

    Raises:
        UsageError: there are no fragments, one has nothing to synchronise, two have a parameter in common, or
            the inner optimizer trains a parameter of none, in which ranks would drift apart.
    """
    if not fragments:
        raise UsageError("model_fragments is empty: give at least one module, as [model]")
    trained = {id(parameter) for parameter in optimised(inner_optimizer)}
    places: dict[int, str] = {}
    members: dict[str, dict[str, nn.Parameter]] = {}
    for number, module in enumerate(fragments):
        name = f"fragment {number} ({type(module).__name__})"
        members[name] = {}
        for path, parameter in module.named_parameters():
            if not parameter.numel() or not (parameter.requires_grad or id(parameter) in trained):
                continue
            place = f"{path!r} of {name}"
            other = places.setdefault(id(parameter), place)
            if other != place:
                raise UsageError(f"{other} and {place} are one parameter: it may be in one fragment only")
            members[name][f"{number}.{path}"] = parameter
        if not members[name]:
            raise UsageError(f"{name} has no parameters that are trained: leave it out of model_fragments")
    for parameter in optimised(inner_optimizer):
        if parameter.numel() and id(parameter) not in places:
            raise UsageError(
                f"inner_optimizer trains a parameter of shape {tuple(parameter.shape)} that is in no"
                " fragment: ranks would drift apart in it; add its module to model_fragments"
            )
    return members


def outer_optimizers(
    members: Mapping[str, Mapping[str, nn.Parameter]],
    inner_optimizer: Optimizer,
    outer_optimizer: Optimizer | Sequence[Optimizer],
) -> list[Optimizer]:
    """Return the outer optimizer of each fragment.

    Raises:
        UsageError: their number is wrong, one is the inner one, or one lacks a parameter of its fragment.
    """
    if isinstance(outer_optimizer, Optimizer):
        outer = [outer_optimizer] * len(members)
    else:
        outer = list(outer_optimizer)
        if len(outer) != len(members):
            raise UsageError(
                f"outer_optimizer has {len(outer)} optimizers for {len(members)} fragments: give one for"
                " each, in their order, or a single one over all parameters"
            )
    if inner_optimizer in outer:
        raise UsageError("inner_optimizer is also an outer_optimizer: the outer one is another object")
    for (name, parameters), optimizer in zip(members.items(), outer, strict=True):
        known = {id(parameter) for parameter in optimised(optimizer)}
        for parameter in parameters.values():
            if id(parameter) not in known:
                raise UsageError(
                    f"outer_optimizer has no parameter of shape {tuple(parameter.shape)} that {name} has:"
                    " make it over the model's own parameters, all of them"
                )
    return outer

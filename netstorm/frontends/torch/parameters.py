"""Parameters as vectors: one contiguous vector for all parameters of one type on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from netstorm.errors import UsageError

__all__ = [
    "FlatParameters",
    "by_kind",
    "everything_in",
    "optimised",
    "outer_optimizers",
    "own_gradients",
    "trained_parameters",
]


class FlatParameters:
    """Parameters (or buffers) of one type on one device, in a fixed order, read and written as one vector.

    One vector is one collective, however many parameters there are. Of a sharded parameter (`DTensor`) it is
    this rank's shard.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        first = _values(self.parameters[0])
        self.dtype, self.device = first.dtype, first.device
        self._shapes = [_values(parameter).shape for parameter in self.parameters]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each parameter."""
        return [tuple(shape) for shape in self._shapes]

    @property
    def size(self) -> int:
        """How many elements the vector has."""
        return sum(shape.numel() for shape in self._shapes)

    def read(self) -> torch.Tensor:
        """Return a new vector of the values."""
        return torch.cat([_values(parameter).reshape(-1) for parameter in self.parameters])

    def write(self, vector: torch.Tensor) -> None:
        """Set the parameters to the values of `vector`."""
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._parts(vector), strict=True):
                _values(parameter).copy_(part)

    def set_gradients(self, vector: torch.Tensor) -> None:
        """Set the gradients to (views of) `vector`."""
        for parameter, part in zip(self.parameters, self._parts(vector.to(self.dtype)), strict=True):
            parameter.grad = _like(parameter, part)

    def check_unchanged(self, owner: str) -> None:
        """Raise `UsageError` if a parameter has got another type, shape or device since the beginning."""
        for parameter, shape in zip(self.parameters, self._shapes, strict=True):
            values = _values(parameter)
            if (values.dtype, values.device, values.shape) != (self.dtype, self.device, shape):
                raise UsageError(
                    f"a parameter of {owner} was {self.dtype} {tuple(shape)} on {self.device} and is now"
                    f" {values.dtype} {tuple(values.shape)} on {values.device}: convert or move the model"
                    " first"
                )

    def _parts(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        parts = torch.split(vector, [shape.numel() for shape in self._shapes])
        for shape, part in zip(self._shapes, parts, strict=True):
            yield part.view(shape)


def by_kind(parameters: Iterable[torch.Tensor]) -> list[FlatParameters]:
    """Return `parameters` as one vector for each type and device, in the order of their first parameters."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        values = _values(parameter)
        kinds.setdefault((values.dtype, values.device), []).append(parameter)
    return [FlatParameters(members) for members in kinds.values()]


def everything_in(modules: Iterable[nn.Module]) -> list[FlatParameters]:
    """Return all parameters and buffers of `modules`, trained or not, each once."""
    tensors = {
        id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
    }
    return by_kind(tensors.values())


def optimised(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def own_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Take the gradients away from the parameters of `optimizer`, and give them back at the end.

    So an outer optimizer sees only the gradients that it is given, and the script finds those that it
    accumulates. Optimizers skip parameters without gradients.
    """
    parameters = optimised(optimizer)
    kept = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _values(parameter: torch.Tensor) -> torch.Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


# Which parameters belong to which fragment and outer optimizer: what could go wrong silently is refused.


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

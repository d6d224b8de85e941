"""What `AsynchronousSGD` has of a model: where blocks are updated, and parameters and momenta by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from netstorm.errors import CheckpointError
from netstorm.frontends.torch.parameters import FlatParameters
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.elastic import HeldKey
from netstorm.kvstore.process.runtime import Runtime
from netstorm.training.dcasgd import OwnedDCASGD, VectorState, decoded_momentum
from netstorm.training.owned_blocks import block_extent

__all__ = ["ComputingThread", "NamedVector", "restore_parameters"]


class ComputingThread:
    """The process's thread for computing, as `UpdateThread`. An update that fails ends the job."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Final = runtime

    def call(self, function: Callable[[], None]) -> None:
        """Call a function after those before."""
        runtime = self._runtime

        def run() -> None:
            try:
                function()
            except Exception as error:
                runtime.fail(f"its update of a block has failed: {type(error).__name__}: {error}")
                raise

        runtime.computing.run(run)

    def post(self, function: Callable[[], None]) -> None:
        """Have the I/O thread call a function."""
        self._runtime.post(lambda _node, _now: function())


# Owners know nothing of names: they hold blocks of vectors. A checkpoint has tensors of the model's shapes,
# so a job of any number of ranks, with any size of blocks, can begin with it.


class NamedVector:
    """Parameters of one type on one device, by their names in the model.

    Attributes:
        flat: they.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        self.flat: Final = flat
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names: Final = [names[id(parameter)] for parameter in flat.parameters]

    def state_of(
        self, key: Key, held: HeldKey
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        """Return parameters and momenta (empty: there are none) by name, and how often most blocks have been
        updated at most, as owners hold them.
        """
        momentum, updates = np.zeros_like(held.values), 0
        has_momentum = False
        for block, data in held.states.items():
            place = block_extent(key, block, whole=OwnedDCASGD.whole)
            count, part = decoded_momentum(data, place.stop - place.start, key.dtype)
            updates = max(count, updates)
            if part is not None:
                momentum[place] = part
                has_momentum = True
        return self._divided(held.values), self._divided(momentum) if has_momentum else {}, updates

    def begun(self, state: Mapping[str, Any], place: int) -> VectorState:
        """Return what a saved state has of this vector, which is at `place` among all of the model.

        Raises:
            CheckpointError: it is of another model.
        """
        momenta, updates = state["momenta"], state["updates"]
        momentum = self.gathered(momenta).numpy() if momenta else None
        return VectorState(momentum, int(updates[place]) if place < len(updates) else 0)

    def gathered(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Return tensors by name as one vector, on the CPU.

        Raises:
            CheckpointError: they are of another model.
        """
        members = zip(self._names, self.flat.parameters, strict=True)
        return FlatParameters([_tensor(tensors, name, one) for name, one in members]).read().cpu()

    def _divided(self, vector: Array) -> dict[str, torch.Tensor]:
        shapes = self.flat.shapes
        parts = torch.split(torch.from_numpy(vector), [int(np.prod(shape, dtype=int)) for shape in shapes])
        return {
            name: part.reshape(shape) for name, part, shape in zip(self._names, parts, shapes, strict=True)
        }


def restore_parameters(vectors: Sequence[NamedVector], state: Mapping[str, Any]) -> list[VectorState]:
    """Give the model the parameters of a saved state; return what else it has of each vector.

    Raises:
        CheckpointError: it is no state of `AsynchronousSGD`, or one of another model; the model is unchanged.
    """
    if not {"parameters", "momenta", "updates"} <= state.keys():
        raise CheckpointError(
            "state= is none of AsynchronousSGD's: give what checkpoint.load has returned of an object of "
            "that class, such as loaded.state['training']"
        )
    values = [vector.gathered(state["parameters"]) for vector in vectors]
    begun = [vector.begun(state, place) for place, vector in enumerate(vectors)]
    for vector, one in zip(vectors, values, strict=True):
        vector.flat.write(one.to(vector.flat.device))
    return begun


def _tensor(tensors: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    found = tensors.get(name)
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (like.shape, like.dtype):
        form = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise CheckpointError(
            f"the checkpoint has {form} for parameter {name!r}, which is {like.dtype} {tuple(like.shape)}: "
            "it is of another model"
        )
    return found

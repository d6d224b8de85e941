"""The blocks of one key that this rank owns, and what it does to them. See `BlockStore`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.torch.parameters import FlatParameters
from netstorm.kvstore.asynchronous.blocks import Gradient, extent
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.elastic import HeldKey
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.frames import Buffer

__all__ = [
    "Floats",
    "NamedVector",
    "OwnedBlocks",
    "UpdateRule",
    "VectorState",
    "decoded_states",
    "encoded_states",
    "problem_of_states",
    "restore_parameters",
]


class OwnedBlocks:
    """Values on the host. Updates run one after the other on the process's thread for computing."""

    whole: Final = False
    """The rule treats each element alone."""

    def __init__(
        self, runtime: Runtime, key: Key, initial: Floats, rule: UpdateRule, begun: VectorState | None = None
    ) -> None:
        """Copy this rank's blocks of a key's initial value, or in an elastic job all blocks, which may become
        this rank's. The key has been granted. A checkpoint may have `begun` its states.
        """
        self._runtime: Final = runtime
        self._rule: Final = rule
        self._dtype: Final = key.dtype
        self._values: Final[dict[int, Floats]] = {}
        self._velocities: Final[dict[int, Floats]] = {}
        self._updates: Final[dict[int, int]] = {}
        self._key: Final = key
        self._begun: Final = begun
        self._initial: Final[dict[int, Floats]] = {}
        """What all ranks began with: for corrections, and for blocks that are installed later."""
        self._from_initial: Final[set[int]] = set()
        """Blocks that this rank has had from their initial value on."""
        self._pulled: Final[dict[tuple[int, int], Buffer]] = {}
        """What each rank has got last, by block and rank; kept for corrections alone."""
        owners, elastic = runtime.node.asynchronous.owners, runtime.node.live.is_elastic
        for block in owners.blocks(key, whole=self.whole):
            start, end = extent(key, block)
            if elastic:
                self._initial[block] = initial[start:end].copy()
            elif owners.owner(key, block) == runtime.rank:
                self._begin(block, initial[start:end])
                if rule.lamda:
                    self._initial[block] = initial[start:end].copy()

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._rule.fingerprint

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint has been loaded."""
        return self._begun is not None

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Have a block updated with a gradient of a rank."""
        pulled = self._pulled.get((block, rank))

        def update() -> None:
            if not isinstance(gradient, np.ndarray) or len(live) != 1:
                raise UsageError(f"a push of rank {rank} with {live}: expected an array and a learning rate")
            weight = self._values[block]
            base = weight
            if self._rule.lamda:
                if pulled is not None:
                    base = _floats(pulled, self._dtype)
                elif block in self._from_initial:
                    base = self._initial[block]
            velocity, values = self._velocities.get(block), cast("Floats", gradient)
            self._rule.update(weight, velocity, values, base=base, rate=live[0])
            self._updates[block] += 1

        self._compute(update, done)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Give `done` a copy of a block's value, behind the updates that are queued."""
        found: list[Floats] = []
        self._compute(lambda: found.append(self._values[block].copy()), lambda: done(found[0]))

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Keep what a rank gets, if gradients are corrected. Ranks that get the same value share it."""
        if self._rule.lamda:
            self._pulled[block, rank] = value

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Give `done` the count of updates and the momentum, if there is one, as bytes."""
        found: list[bytes] = []
        self._compute(
            lambda: found.append(encoded_states(self._updates[block], self._velocities.get(block))),
            lambda: done(found[0]),
        )

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Tell `done` whether states are a count of updates and a momentum of this size."""
        problem = problem_of_states(states, self._initial[block].nbytes if self._rule.momentum else 0)
        self._compute(lambda: None, lambda: done(f"{problem}, for {self.rule}" if problem else ""))

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Begin to hold a block, with the initial value or another owner's state.

        What ranks have pulled of it is not known then: their next gradients are not corrected.
        """
        self._forget_pulled(block)

        def begin() -> None:
            if values is None:
                self._begin(block, self._initial[block])
            else:
                self._begin(block, _floats(values, self._dtype))
                self._from_initial.discard(block)
            if states:
                self._updates[block], velocity = decoded_states(states, self._dtype)
                if velocity is not None:
                    self._velocities[block] = velocity.copy()

        self._compute(begin, lambda: None)

    def discard(self, block: int) -> None:
        """Hold a block no longer."""
        self._forget_pulled(block)

        def drop() -> None:
            self._values.pop(block, None)
            self._velocities.pop(block, None)
            self._updates.pop(block, None)

        self._compute(drop, lambda: None)

    def _begin(self, block: int, value: Floats) -> None:
        self._values[block] = value.copy()
        self._from_initial.add(block)
        begun = self._begun
        self._updates[block] = 0 if begun is None else begun.updates
        if not self._rule.momentum:
            return
        if begun is None or begun.momentum is None:
            self._velocities[block] = np.zeros(value.size, self._dtype)
        else:
            begin, end = extent(self._key, block)
            self._velocities[block] = begun.momentum[begin:end].copy()

    def _forget_pulled(self, block: int) -> None:
        for place in [place for place in self._pulled if place[0] == block]:
            del self._pulled[place]

    def _compute(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `work` on the thread for computing, and then `done` on the I/O thread."""
        runtime = self._runtime

        def run() -> None:
            try:
                work()
            except Exception as error:
                runtime.fail(f"its update of a block has failed: {type(error).__name__}: {error}")
                raise
            runtime.post(lambda _node, _now: done())

        runtime.computing.run(run)


def _floats(value: Buffer, dtype: np.dtype[np.generic]) -> Floats:
    return cast("Floats", np.frombuffer(value, dtype))


# SGD with a momentum and delay compensation, on one block of values. Pure.
#
# Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
# equation 10 and algorithm 2. A momentum is over corrected gradients.

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """What happens to a block when a gradient comes; the learning rate comes with each gradient.

    Raises:
        UsageError: a value that is not allowed.
    """

    momentum: float = 0.0
    lamda: float = 0.0
    """Weight of the correction; 0: none."""
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and self.lamda >= 0 and self.weight_decay >= 0):
            raise UsageError(
                f"momentum={self.momentum}, lamda={self.lamda}, weight_decay={self.weight_decay}: expected a "
                "momentum from 0 to below 1, and the others not negative"
            )

    @property
    def fingerprint(self) -> str:
        """Names the rule: all ranks must have the same."""
        return f"DCASGD momentum={self.momentum!r} lamda={self.lamda!r} weight_decay={self.weight_decay!r}"

    def update(
        self, weight: Floats, velocity: Floats | None, gradient: Floats, *, base: Floats, rate: float
    ) -> None:
        """Update a block in place.

        Args:
            weight: the block.
            velocity: of the same size, zeros at first; None without a momentum.
            gradient: of one rank.
            base: the weight that it was computed on.
            rate: the learning rate of that rank.
        """
        found = gradient + self.weight_decay * weight
        if self.lamda:
            found += self.lamda * gradient * gradient * (weight - base)
        if velocity is None:
            weight -= rate * found
        else:
            velocity *= self.momentum
            velocity -= rate * found
            weight += velocity


# What `AsynchronousSGD` saves, and begins with: parameters, momenta and counts of updates, by name.
#
# Owners know nothing of names: they hold blocks of vectors. A checkpoint has tensors of the model's shapes,
# so a job of any number of ranks, with any size of blocks, can begin with it.

_COUNT: Final = struct.Struct("<q")
"""Number of updates of a block, before its momentum."""


@dataclass(frozen=True, slots=True)
class VectorState:
    """What a checkpoint has of a vector besides its values."""

    momentum: Floats | None
    """Of all its elements; None: it has none."""
    updates: int


def encoded_states(updates: int, momentum: Floats | None) -> bytes:
    """Return what an owner's rule has of a block as bytes."""
    return _COUNT.pack(updates) + (b"" if momentum is None else momentum.tobytes())


def decoded_states(data: bytes, dtype: np.dtype[np.generic]) -> tuple[int, Floats | None]:
    """Return what `encoded_states` was given."""
    (updates,) = _COUNT.unpack_from(data)
    momentum: Floats = np.frombuffer(data, dtype, offset=_COUNT.size)
    return updates, momentum if momentum.size else None


def problem_of_states(data: bytes, nbytes: int) -> str:
    """Return why `decoded_states` could not take these bytes, of a momentum of `nbytes`; empty: it can."""
    if len(data) != _COUNT.size + nbytes:
        return f"{len(data)} bytes: expected a count of {_COUNT.size} bytes and a momentum of {nbytes}"
    (updates,) = _COUNT.unpack_from(data)
    return "" if updates >= 0 else f"counted as {updates} updates: expected 0 or more"


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
            count, part = decoded_states(data, key.dtype)
            updates = max(count, updates)
            if part is not None:
                begin, end = extent(key, block)
                momentum[begin:end] = part
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

"""SGD with a momentum and delay compensation: gradients are corrected for what others have changed meanwhile.

A gradient g of rank m was computed on the value that m has pulled, w_bak(m). On the value w that it is
applied to, it would have been about g + λ g⊙g⊙(w - w_bak(m)) (Zheng et al., "Asynchronous Stochastic Gradient
Descent with Delay Compensation", ICML 2017, equation 10 and algorithm 2). A momentum is over corrected
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.kvstore.asynchronous.blocks import Gradient, block_extent
from netstorm.kvstore.forms import Array, Key
from netstorm.protocol.frames import Buffer
from netstorm.training.rule_states import (
    ArrayForm,
    ArrayState,
    OptimizerState,
    decoded_state,
    encoded_state,
    problem_of_state,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DCASGD", "Floats", "OwnedDCASGD", "VectorState", "compensated_step", "decoded_momentum"]

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


class Vector(Protocol):
    """An array of NumPy's or of a framework. Those of one update are of one kind, and `+=` changes them in
    place.
    """

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __mul__(self, other: Self | float, /) -> Self: ...

    def __rmul__(self, other: float, /) -> Self: ...


V = TypeVar("V", bound=Vector)


def compensated_step(
    weight: V,
    velocity: V | None,
    gradient: V,
    *,
    base: V,
    rate: float,
    momentum: float,
    lamda: float,
    weight_decay: float,
) -> None:
    """Update a weight in place.

    Args:
        weight: of any shape, as are the others.
        velocity: zeros at first; None without a momentum.
        gradient: of one rank.
        base: the weight that it was computed on.
        rate: the learning rate of that rank.
        momentum: from 0 to below 1.
        lamda: weight of the correction; 0: none.
        weight_decay: as in other SGD; not corrected.
    """
    corrected = gradient + weight_decay * weight
    if lamda:
        corrected += lamda * gradient * gradient * (weight - base)
    if velocity is None:
        weight -= rate * corrected
    else:
        velocity *= momentum
        velocity -= rate * corrected
        weight += velocity


@dataclass(frozen=True, slots=True, kw_only=True)
class DCASGD:
    """What is the same for all gradients; the learning rate comes with each.

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
        """Update a block in place; see `compensated_step`."""
        compensated_step(
            weight,
            velocity,
            gradient,
            base=base,
            rate=rate,
            momentum=self.momentum,
            lamda=self.lamda,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True)
class VectorState:
    """What a checkpoint has of a vector besides its values."""

    momentum: Floats | None
    """Of all its elements; None: it has none."""
    updates: int


class OwnedDCASGD:
    """The rule of one key's blocks, in NumPy's arrays. See `BlockRule`."""

    whole: Final = False
    """It treats each element alone."""

    def __init__(self, key: Key, rule: DCASGD, saved: VectorState | None = None) -> None:
        """Begin without blocks. A checkpoint may have `saved` what they begin with."""
        self._key: Final = key
        self._rule: Final = rule
        self._saved: Final = saved
        self._velocities: Final[dict[int, Floats]] = {}
        self._updates: Final[dict[int, int]] = {}

    @property
    def fingerprint(self) -> str:
        """Names the rule."""
        return self._rule.fingerprint

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self._saved is not None

    @property
    def compensates(self) -> bool:
        """Whether gradients are corrected."""
        return self._rule.lamda > 0

    def begin(self, block: int, values: Array, states: bytes) -> Floats:
        """Begin with a count of updates and a momentum: another owner's, the checkpoint's, or zeros."""
        saved = self._saved
        updates, velocity = (0, None) if saved is None else (saved.updates, saved.momentum)
        if velocity is not None:
            velocity = velocity[block_extent(self._key, block, whole=self.whole)]
        if states:
            updates, sent = decoded_momentum(states, values.size, self._key.dtype)
            velocity = velocity if sent is None else sent
        self._updates[block] = updates
        if self._rule.momentum:
            zeros = np.zeros(values.size, self._key.dtype)
            self._velocities[block] = cast("Floats", zeros) if velocity is None else velocity.copy()
        return cast("Floats", values.copy())

    def update(
        self, block: int, values: Floats, gradient: Gradient, live: tuple[float, ...], base: Array | None
    ) -> None:
        """Update a block in place; `live` is a learning rate."""
        if not isinstance(gradient, np.ndarray) or len(live) != 1:
            raise UsageError(
                f"a push of key {self._key.name!r} with {live}: expected an array and a learning rate"
            )
        self._rule.update(
            values,
            self._velocities.get(block),
            cast("Floats", gradient),
            base=values if base is None else cast("Floats", base),
            rate=live[0],
        )
        self._updates[block] += 1

    def read(self, values: Floats, then: Callable[[Buffer], None]) -> None:
        """Call `then` with a copy."""
        then(values.copy())

    def encoded_state(self, block: int, values: Floats) -> bytes:
        """Return the count of updates and the momentum, if there is one."""
        velocity, updates = self._velocities.get(block), self._updates[block]
        state = (
            None if velocity is None else ArrayState(velocity.shape, velocity.dtype.name, velocity.tobytes())
        )
        return encoded_state(
            OptimizerState(state=state, begun=updates > 0, updates=updates, all_updates=updates)
        )

    def problem_of(self, block: int, initial: Array, states: bytes) -> str:
        """Return why `begin` could not take these states, and what it expects; empty: it can."""
        expected = ArrayForm(initial.shape, self._key.dtype) if self._rule.momentum else None
        try:
            problem = problem_of_state(decoded_state(states).state, expected)
        except ProtocolViolation as error:
            problem = str(error)
        return f"{problem}, for {self.fingerprint}" if problem else ""

    def drop(self, block: int) -> None:
        """Forget a block's momentum and count."""
        self._velocities.pop(block, None)
        self._updates.pop(block, None)


def decoded_momentum(states: bytes, size: int, dtype: np.dtype[np.generic]) -> tuple[int, Floats | None]:
    """Return the count of updates and the momentum that `OwnedDCASGD.encoded_state` was made of.

    Raises:
        ProtocolViolation: another owner has sent something else for a block of this size and type.
    """
    sent = decoded_state(states)
    if sent.state is None:
        return sent.updates, None
    problem = problem_of_state(sent.state, ArrayForm((size,), dtype))
    if problem or not isinstance(sent.state, ArrayState):
        raise ProtocolViolation(f"a momentum of a block: {problem}")
    return sent.updates, cast("Floats", np.frombuffer(sent.state.values, dtype))

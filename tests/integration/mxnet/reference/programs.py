"""Random programs of KVStore calls that mean the same to MXNet's own `dist_sync` and to NetStorm.

A program is a list of calls; every rank makes the same ones, with values of its own. Left out is where the
two differ, or where MXNet's own result is left to chance:

* an array that was pushed is not looked at again: MXNet's pull may overwrite it;
* `set_optimizer` has barriers around it, and comes before the first push of any key: MXNet's servers begin
  with new states each time that any rank calls it;
* integers: MXNet's servers abort ("only support floating point types", 1.9.1);
* int keys above 215,329: MXNet's worker multiplies a key by 9973 in 32 bits to choose a server, and crashes;
* other numbers of arrays for one key: MXNet's worker crashes when a push has more devices than the first had;
* `_set_updater`, which MXNet's distributed stores ignore.

To add a kind of call: a class with `draw` and `play`, in `CALLS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from netstorm.frontends.mxnet.compat import mx

__all__ = ["OPTIMISERS", "Program", "play", "program"]

OPTIMISERS: dict[str, tuple[bool, dict[str, Any]]] = {
    "sgd": (True, {"learning_rate": 0.5, "wd": 0.0}),
    "sgd momentum": (True, {"learning_rate": 0.25, "momentum": 0.5, "rescale_grad": 0.5}),
    "sgd weight decay": (True, {"learning_rate": 0.5, "wd": 0.25, "clip_gradient": 4.0}),
    "nag": (False, {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": (False, {"learning_rate": 0.01}),
    "rmsprop": (False, {"learning_rate": 0.01, "centered": True}),
    "adagrad": (False, {"learning_rate": 0.1}),
    "signum": (False, {"learning_rate": 0.01, "momentum": 0.9}),
    "ftrl": (False, {"learning_rate": 0.1}),
}
"""By name: whether its arithmetic is exact for a while on small integers, and what to make it with."""

SHAPES = ((1,), (3,), (2, 3), (50, 50), (1, 7, 1), (123, 17), (4001,), (3, 1, 5, 2))

OnPulled = Callable[[Any], None]
"""Takes what a rank has pulled, for the comparison."""


@dataclass(frozen=True)
class Tensor:
    """A key."""

    name: int | str
    shape: tuple[int, ...]
    dtype: str
    devices: int
    """How many arrays each push of it has."""


@dataclass
class State:
    """What a program has done so far, while it is drawn."""

    free: list[Tensor]
    """Not yet initialised."""
    known: list[Tensor] = field(default_factory=list)
    serial: int = 0

    def next_serial(self) -> int:
        """Return a number for a call, which its values are drawn from."""
        self.serial += 1
        return self.serial

    def some(self, chance: random.Random) -> tuple[Tensor, ...]:
        """Return one or several of the keys."""
        return tuple(chance.sample(self.known, chance.randint(1, min(4, len(self.known)))))


class Call(Protocol):
    """One call of a program."""

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        """Make it."""


class Values:
    """What a rank pushes: integers so small that sums and exact updates have no rounding."""

    def __init__(self, seed: int, rank: int) -> None:
        self._origin = (seed, rank)

    def array(self, serial: int, tensor: Tensor, device: int = 0) -> Any:
        """Return a new array."""
        drawn = np.random.default_rng([*self._origin, serial, device, *str(tensor.name).encode()])
        values = drawn.integers(-3, 4, tensor.shape).astype(tensor.dtype)
        return mx.nd.array(values, ctx=mx.cpu(device), dtype=tensor.dtype)


def _outs(tensors: tuple[Tensor, ...], devices: int) -> list[list[Any]]:
    return [
        [mx.nd.full(tensor.shape, -77, ctx=mx.cpu(device), dtype=tensor.dtype) for device in range(devices)]
        for tensor in tensors
    ]


def _said(lists: list[list[Any]], *, plain: bool) -> Any:
    """Return arguments as scripts write them: a single key's without a list, if `plain`."""
    short = [arrays[0] if len(arrays) == 1 else arrays for arrays in lists]
    return short[0] if plain else short


def _names(tensors: tuple[Tensor, ...], *, plain: bool) -> Any:
    return tensors[0].name if plain else [tensor.name for tensor in tensors]


@dataclass(frozen=True)
class Begin:
    """`init` or `broadcast` of new keys."""

    tensors: tuple[Tensor, ...]
    serial: int
    broadcast: bool
    plain: bool

    @classmethod
    def draw(cls, chance: random.Random, state: State) -> Call | None:
        if not state.free:
            return None
        tensors = tuple(state.free.pop() for _ in range(chance.randint(1, min(3, len(state.free)))))
        state.known += tensors
        plain = len(tensors) == 1 and chance.random() < 0.7
        return cls(tensors, state.next_serial(), chance.random() < 0.3, plain)

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        given = [[values.array(self.serial, tensor)] for tensor in self.tensors]
        names, arrays = _names(self.tensors, plain=self.plain), _said(given, plain=self.plain)
        if self.broadcast:
            outs = _outs(self.tensors, 1)
            kv.broadcast(names, arrays, out=_said(outs, plain=self.plain))
            on_pulled(outs)
        else:
            kv.init(names, arrays)


@dataclass(frozen=True)
class Push:
    """`push` of one or several keys, now and then of a key twice in a list, or of several devices."""

    tensors: tuple[Tensor, ...]
    serial: int
    priority: int
    plain: bool

    @classmethod
    def draw(cls, chance: random.Random, state: State) -> Call | None:
        tensors = state.some(chance)
        if chance.random() < 0.15 and tensors[-1].devices == 1:
            tensors += (tensors[-1],)
        plain = len(tensors) == 1 and chance.random() < 0.7
        return cls(tensors, state.next_serial(), chance.randint(-3, 3), plain)

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        given = [
            [values.array(self.serial + 1000 * place, tensor, device) for device in range(tensor.devices)]
            for place, tensor in enumerate(self.tensors)
        ]
        kv.push(
            _names(self.tensors, plain=self.plain), _said(given, plain=self.plain), priority=self.priority
        )


@dataclass(frozen=True)
class Pull:
    """`pull` to one or several arrays each."""

    tensors: tuple[Tensor, ...]
    devices: int
    plain: bool

    @classmethod
    def draw(cls, chance: random.Random, state: State) -> Call | None:
        tensors = state.some(chance)
        plain = len(tensors) == 1 and chance.random() < 0.7
        return cls(tensors, chance.choice((1, 1, 2)), plain)

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        outs = _outs(self.tensors, self.devices)
        kv.pull(_names(self.tensors, plain=self.plain), out=_said(outs, plain=self.plain))
        on_pulled(outs)


@dataclass(frozen=True)
class PushPull:
    """`pushpull`, to other arrays or to those that were pushed."""

    tensors: tuple[Tensor, ...]
    serial: int
    in_place: bool
    plain: bool

    @classmethod
    def draw(cls, chance: random.Random, state: State) -> Call | None:
        tensors = state.some(chance)
        plain = len(tensors) == 1 and chance.random() < 0.7
        return cls(tensors, state.next_serial(), chance.random() < 0.4, plain)

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        given = [
            [values.array(self.serial, tensor, device) for device in range(tensor.devices)]
            for tensor in self.tensors
        ]
        outs = given if self.in_place else _outs(self.tensors, 1)
        more = {} if self.in_place else {"out": _said(outs, plain=self.plain)}
        kv.pushpull(_names(self.tensors, plain=self.plain), _said(given, plain=self.plain), **more)
        on_pulled(outs)


@dataclass(frozen=True)
class Wait:
    """`_barrier`."""

    @classmethod
    def draw(cls, _chance: random.Random, _state: State) -> Call | None:
        return cls()

    def play(self, kv: Any, values: Values, on_pulled: OnPulled) -> None:
        kv._barrier()


CALLS: dict[Any, int] = {Begin: 3, Push: 6, Pull: 6, PushPull: 4, Wait: 1}
"""Kinds of calls, and how often they come."""


@dataclass(frozen=True)
class Program:
    """What every rank does, one call after the other."""

    seed: int
    optimiser: str
    """"": none; sums replace values."""
    calls: tuple[Call, ...]

    FLAWLESS: ClassVar = 1e-5
    """Relative error of results that have roundings, over the few updates that a program makes."""

    @property
    def exact(self) -> bool:
        """Whether results must be the same bits."""
        return not self.optimiser or OPTIMISERS[self.optimiser][0]


def program(seed: int, *, strings: bool, optimiser: str, calls: int = 30) -> Program:
    """Return the program of a seed.

    Args:
        seed: of everything; keys of different seeds differ, so that programs may share a store.
        strings: keys are str, not int.
        optimiser: of `OPTIMISERS`; "": none.
        calls: how many.
    """
    chance = random.Random(f"{seed} {strings} {optimiser}")
    free = [
        Tensor(
            f"p{seed}_{number}" if strings else 100 * seed + number,
            chance.choice(SHAPES),
            "float32"
            if optimiser
            else chance.choice(("float32", "float32", "float32", "float16", "float64")),
            chance.choice((1, 1, 1, 2, 3)),
        )
        for number in range(6)
    ]
    state = State(free)
    first = Begin.draw(chance, state)
    assert first is not None
    drawn: list[Call] = [first]
    kinds, weights = zip(*CALLS.items(), strict=True)
    while len(drawn) < calls:
        call = chance.choices(kinds, weights)[0].draw(chance, state)
        if call is not None:
            drawn.append(call)
    drawn.append(Pull(tuple(state.known), 1, plain=False))
    return Program(seed, optimiser, tuple(drawn))


def play(kv: Any, one: Program, keep: Callable[[str, Any], None], *, wait: bool) -> None:
    """Make the calls of a program; `keep` gets a name and each array that was pulled.

    Args:
        kv: the store.
        one: the program.
        keep: see above.
        wait: after each call until it is done. MXNet's store needs that: with many calls under way at once
            its pulls sometimes never come back. NetStorm's must not.
    """
    values = Values(one.seed, kv.rank)
    if one.optimiser:
        kv._barrier()
        name, more = one.optimiser.split()[0], OPTIMISERS[one.optimiser][1]
        kv.set_optimizer(mx.optimizer.create(name, **more))
        kv._barrier()
    pulled: list[Any] = []
    for number, call in enumerate(one.calls):

        def keep_copies(outs: list[list[Any]], number: int = number) -> None:
            # Copies: MXNet goes on using an array that was pushed, also after it has pulled to it.
            pulled.extend((number, array.copy()) for arrays in outs for array in arrays)

        call.play(kv, values, keep_copies)
        if wait:
            mx.nd.waitall()
    for place, (number, array) in enumerate(pulled):
        keep(f"seed {one.seed}, array {place}, call {number}: {one.calls[number]}"[:300], array.asnumpy())

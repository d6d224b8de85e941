"""What a script has that a newcomer needs, too: its place in the training data, weights of its own.

Each is attached under a name, with a function that returns it and one that takes it over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.checkpoint import from_tree, optimizer_values, restore_optimizer_values
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray

__all__ = ["Get", "ScriptStates", "Set", "trainer_state"]

Get = Callable[[], object]
"""Returns dictionaries, lists, numbers, texts and arrays."""

Set = Callable[[Any], object]
"""Takes what a `Get` has returned at another rank; arrays are MXNet's, on the host."""


class ScriptStates:
    """The attached states of one script."""

    def __init__(self) -> None:
        self._attached: Final[dict[str, tuple[Get, Set]]] = {}
        self._received: dict[str, object] = {}

    def attach(self, name: str, get: Get, take: Set) -> None:
        """Attach a state. If it has been received, it is taken over now.

        Raises:
            UsageError: the name is taken.
        """
        if name in self._attached:
            raise UsageError(f"attach_state: {name!r} is attached already; give each state its own name")
        if name in self._received:
            take(_with_arrays(self._received.pop(name)))
        self._attached[name] = (get, take)

    def receive(self, states: dict[str, object]) -> None:
        """Keep the states of other ranks until they are attached."""
        self._received = dict(states)

    def collect(self) -> tuple[dict[str, object], list[NDArray]]:
        """Return the states by name, and the arrays in them: copies that are queued on MXNet's engine."""
        copies: list[NDArray] = []
        return {name: _staged(get(), name, copies) for name, (get, _) in self._attached.items()}, copies


def _staged(state: object, name: str, copies: list[NDArray]) -> object:
    if isinstance(state, mx.nd.NDArray):
        if state.stype != "default":
            raise UsageError(f"attach_state: {name!r} has a {state.stype} array: give dense ones")
        buffer = StagingBuffer.like(state)
        buffer.copy_from(state)
        copies.append(buffer.array)
        return buffer.array
    if isinstance(state, np.ndarray):
        return state.copy()
    if isinstance(state, dict):
        return {key: _staged(value, name, copies) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_staged(value, name, copies) for value in state)
    return state


def _with_arrays(tree: object) -> object:
    if isinstance(tree, np.ndarray):
        with mx.util.np_shape(True):
            return from_tree(tree)
    if isinstance(tree, dict):
        return {key: _with_arrays(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with_arrays(value) for value in tree)
    return tree


def trainer_state(trainer: mx.gluon.Trainer) -> tuple[Get, Set]:
    """Return the functions for a Trainer that updates the weights itself (`update_on_kvstore=False`).

    Its weights, the states of its updater and its optimizer's counts and rates travel; not the running
    statistics of a batch normalisation, which are each rank's own.
    """

    def parameters() -> list[mx.gluon.Parameter]:
        return [one for one in trainer._params if one.grad_req != "null"]  # noqa: SLF001

    def get() -> object:
        updater = trainer._updaters[0]  # noqa: SLF001 -- one for each device; all have the same states
        return {
            "weights": [one.list_data()[0] for one in parameters()],
            "states": dict(updater.states),
            "optimizer": optimizer_values(trainer._optimizer),  # noqa: SLF001
        }

    def take(state: Any) -> None:
        weights, own = state["weights"], parameters()
        if len(weights) != len(own):
            raise UsageError(
                f"attach_trainer: the job's model has {len(weights)} weights and this one {len(own)}: all "
                "ranks must train the same model"
            )
        for one, weight in zip(own, weights, strict=True):
            one.set_data(weight)
        restore_optimizer_values(trainer._optimizer, state["optimizer"])  # noqa: SLF001
        for updater in trainer._updaters:  # noqa: SLF001
            updater.states = {key: _copied(value) for key, value in state["states"].items()}
            updater.states_synced = dict.fromkeys(updater.states, False)

    return get, take


def _copied(state: object) -> object:
    if isinstance(state, mx.nd.NDArray):
        return state.copy()
    if isinstance(state, (list, tuple)):
        return type(state)(_copied(item) for item in state)
    return state

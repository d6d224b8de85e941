"""The blocks that this rank owns, in MXNet's arrays, and the thread that applies pushes to them.

An optimizer is Python code that queues operations on MXNet's engine, and some optimizers wait for values.
Other ranks' gradients must not block the script's thread, nor an optimizer the I/O thread. So updates have a
thread of their own. When a rank pulls a value, the engine makes a copy behind the updates that belong in it.

What comes together is answered together: a step has many keys, and each hand-over wakes a thread.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import numpy as np

from netstorm import clock
from netstorm.compression.sparse import Rows
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays import array_of, filled_rows, memory_of, rows_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, compute_in_background, push_async
from netstorm.frontends.mxnet.updates import CalledUpdater, queueing
from netstorm.kvstore.asynchronous.blocks import Gradient, extent, has_whole_rows
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.runtime import Runtime, after_close
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.frames import Buffer
from netstorm.pslite.system import active_calls, yield_to_call
from netstorm.training.dcasgd import compensated_step
from netstorm.training.owned_blocks import serving
from netstorm.training.rule_states import (
    ArrayForm,
    ArrayState,
    ExpectedState,
    JoinedRows,
    JoinedState,
    OptimizerState,
    RuleState,
    SeveralStates,
    decoded_state,
    encoded_state,
    joined,
    problem_of_state,
)

__all__ = ["BlockPlace", "OwnedRule", "Owner", "arrays_of", "with_counts"]


_JOIN_S: Final = 10.0
"""For an update to end, when this process does."""

_TOGETHER_S: Final = 0.001
"""How long what has been done waits for more. A large block takes longer, and waits for none."""

_log = logging.getLogger(__name__)


class Owner:
    """All blocks that one store owns on this rank."""

    def __init__(self, runtime: Runtime, rule: OwnedRule) -> None:
        """Begin with no blocks; `rule` updates them."""
        self.rule = rule
        """May be replaced while no rank has a push or pull outstanding."""
        self.runtime: Final = runtime
        self._calls: Final[deque[Callable[[], None]]] = deque()
        self._goes_on: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        """Wakes the thread; False ends it."""
        self._posted: Final = _Posted()
        self._reads: list[_Read] = []
        """Those that the engine gets next. Only the owner's thread uses this."""
        self._thread: Final = threading.Thread(target=self._run, name="netstorm-owner", daemon=True)
        self._thread.start()
        after_close(self.stop)

    def own(self, key: Key, user_key: int | str, initial: Array) -> None:
        """Copy this rank's blocks of a key's initial value, and begin to serve them. In an elastic job any
        block may be this rank's later, so all of the value is copied.

        The key is known to the job. `initial` must not change before this returns.
        """
        rule = _KeyRule(self, key, user_key)
        self.call(serving(self.runtime.node, key, initial, rule, self))

    def call(self, function: Callable[[], None]) -> None:
        """Have the owner's thread call a function. From any thread; does not wait."""
        self._calls.append(function)
        self.runtime.at_end_of_turn(self._hand_over)

    def post(self, function: Callable[[], None]) -> None:
        """Have the I/O thread call a function. From any thread; does not wait."""
        if self._posted.functions is not None:
            self._posted.functions.append(function)
        else:
            self.runtime.post(lambda _node, _now: function())

    def read(self, values: NDArray, then: Callable[[Buffer], None], name: str) -> None:
        """Have the engine copy a block, behind the updates that are queued. On the owner's thread."""
        self._reads.append(_Read(values, then, name))

    def stop(self) -> None:
        """End the thread."""
        self._goes_on.put(False)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        compute_in_background()
        while self._goes_on.get():
            while self._calls:
                until = clock.monotonic() + _TOGETHER_S
                with self._together():
                    while self._calls and clock.monotonic() < until:
                        self._call(self._calls.popleft())
                self._queue_reads()

    def _hand_over(self) -> None:
        self._goes_on.put(True)

    def _call(self, function: Callable[[], None]) -> None:
        if active_calls:
            yield_to_call()
        try:
            function()
        except Exception as error:  # noqa: BLE001 -- a user's rule may fail in any way
            _log.exception("an update of a block that this rank owns has failed")
            self.runtime.fail(f"its update rule has failed: {type(error).__name__}: {error}")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Have the I/O thread make all calls at once that this thread posts meanwhile."""
        self._posted.functions = functions = list[Callable[[], None]]()
        try:
            yield
        finally:
            self._posted.functions = None
            if functions:
                self.runtime.post(lambda _node, _now: _call_all(functions))

    def _queue_reads(self) -> None:
        reads, self._reads = self._reads, []
        if not reads:
            return
        runtime = self.runtime

        def start(completion: Completion) -> None:
            copies = [_copy_of(read.values) for read in reads]
            completion.succeed()
            with self._together():
                for read, copied in zip(reads, copies, strict=True):
                    read.then(copied)

        def skipped() -> None:
            names = ", ".join(sorted({repr(read.name) for read in reads}))
            runtime.fail(f"an update of key {names}, of which it is an owner, has failed")

        push_async(
            start, reads=[read.values for read in reads], writes=(), name="netstorm_read", skipped=skipped
        )


class _Read(NamedTuple):
    """A block's value that is wanted."""

    values: NDArray
    then: Callable[[Buffer], None]
    name: str
    """Of the key."""


class _Posted(threading.local):
    """What a thread has to give to the I/O thread together; None: it gives each at once."""

    functions: list[Callable[[], None]] | None = None


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _copy_of(values: NDArray) -> Array:
    if values.stype == "row_sparse":
        return rows_of(values).values.reshape(-1).copy()
    return np.frombuffer(memory_of(values), np.uint8).copy()


class _KeyRule:
    """The owner's rule, for the blocks of one key in MXNet's arrays. See `BlockRule`."""

    def __init__(self, owner: Owner, key: Key, user_key: int | str) -> None:
        self._owner: Final = owner
        self._key: Final = key
        self._user_key: Final = user_key

    @property
    def fingerprint(self) -> str:
        """Names the rule."""
        return self._owner.rule.fingerprint

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""
        return self._owner.rule.whole

    @property
    def begins_with_states(self) -> bool:
        """Whether the rule has states or counts of earlier jobs."""
        return self._owner.rule.begins_with_states

    @property
    def compensates(self) -> bool:
        """Whether the rule asks on which value a gradient was computed."""
        return self._owner.rule.compensates

    def begin(self, block: int, values: Array, states: bytes) -> NDArray:
        """Return an array with the values, and take over another owner's states."""
        stored = self._stored(values)
        self._owner.rule.take_state(self._place(block), stored, states)
        return stored

    def update(
        self, block: int, values: NDArray, gradient: Gradient, live: tuple[float, ...], base: Array | None
    ) -> None:
        """Queue the update of a block on MXNet's engine. The gradient has been copied when this returns, and
        an operation that reads the block waits for the update.
        """
        if isinstance(gradient, Rows):
            array = filled_rows(tuple(values.shape), self._key.dtype, gradient)
        else:
            array = self._array_of(gradient)
        rule, place = self._owner.rule, self._place(block)
        if rule.compensates:
            known = values.copy() if base is None else self._array_of(base)
            rule.update_compensated(place, array, values, live, known)
        else:
            rule.update(place, array, values, live)

    def read(self, values: NDArray, then: Callable[[Buffer], None]) -> None:
        """Have the engine copy a block, behind the updates that are queued."""
        self._owner.read(values, then, self._key.name)

    def encoded_state(self, block: int, values: NDArray) -> bytes:
        """Return the optimizer's state of a block."""
        return self._owner.rule.encoded_state(self._place(block), values)

    def problem_of(self, block: int, initial: Array, states: bytes) -> str:
        """Compare a state with one that the optimizer makes."""
        return self._owner.rule.problem_of(self._place(block), self._stored(initial), states)

    def drop(self, block: int) -> None:
        """Forget a block's state, and its count of updates."""
        self._owner.rule.drop_state(self._place(block))

    def _place(self, block: int) -> BlockPlace:
        key = self._key
        return BlockPlace(self._user_key, block, key.spec.shape, extent(key, block)[0])

    def _stored(self, values: Array) -> NDArray:
        """Return a copy of a block's values: row-sparse, with all rows, if the key is."""
        if self._key.spec.form != ROW_SPARSE:
            return self._array_of(values)
        shape = self._shape(values.size)
        return filled_rows(shape, self._key.dtype, Rows(np.arange(shape[0]), values))

    def _array_of(self, values: Array) -> NDArray:
        """Return a copy of dense values of a block, in its shape."""
        return array_of(np.asarray(values, self._key.dtype), self._shape(values.size))

    def _shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a block of `size` elements: that of its rows, if these are whole."""
        shape = self._key.spec.shape
        if not shape or not (size == self._key.elements or has_whole_rows(self._key)):
            return (size,)
        return (size // row_length(shape), *shape[1:])


# DCASGD on owners: gradients are corrected for what others have changed since they were computed.
#
# `mx.optimizer.DCASGD` has one previous weight for all ranks, which is that before the last update by
# whomever. It so corrects even the gradients of a rank that trains alone, and with a momentum it fails on
# every array of more than one element. So owners take its hyper-parameters and its states, and update as
# the paper says (`netstorm.training.dcasgd`), where a momentum is over corrected gradients, as in MXNet.


def compensated_update(
    optimizer: mx.optimizer.Optimizer,
    key: int | str,
    weight: NDArray,
    gradient: NDArray,
    state: object,
    *,
    base: NDArray,
) -> None:
    """Queue an update.

    Args:
        optimizer: an `mx.optimizer.DCASGD`.
        key: the user's.
        weight: is updated.
        gradient: of one rank, dense or row-sparse.
        state: what the optimizer's `create_state_multi_precision` has returned: the momentum and the previous
            weight, with a float32 copy of a float16 weight before them if there is one. The previous weight
            becomes `base`.
        base: the weight that the gradient was computed on.
    """
    rule = cast("Any", optimizer)
    rule._update_count(key)
    rate, decay = rule._get_lr(key), rule._get_wd(key)
    target, states = weight, cast("Any", state)
    if rule.multi_precision and weight.dtype == np.float16:
        target, states = states
    momentum, previous = states
    with mx.autograd.pause():
        previous[:] = base.astype(target.dtype)
        scaled = gradient.tostype("default").astype(target.dtype) * rule.rescale_grad
        if rule.clip_gradient is not None:
            scaled = mx.nd.clip(scaled, -rule.clip_gradient, rule.clip_gradient)
        compensated_step(
            target,
            momentum,
            scaled,
            base=previous,
            rate=rate,
            momentum=rule.momentum,
            lamda=rule.lamda,
            weight_decay=decay,
        )
        if target is not weight:
            weight[:] = target.astype(weight.dtype)


# An optimizer's state of a key that several ranks own blocks of: divided, sent, and joined.


def arrays_of(state: JoinedState) -> object:
    """Return a state in MXNet's arrays, as an optimizer has it."""
    if isinstance(state, list):
        return tuple(arrays_of(member) for member in state)
    if isinstance(state, JoinedRows):
        return filled_rows(state.shape, state.dtype, state.rows)
    if isinstance(state, np.ndarray):
        return mx.nd.array(state, ctx=mx.cpu(), dtype=state.dtype)
    return state


def _form_of(state: object) -> ExpectedState:
    """Return the form of a state that an optimizer has made."""
    if isinstance(state, (list, tuple)):
        return [_form_of(member) for member in state]
    if isinstance(state, mx.nd.NDArray):
        return ArrayForm(tuple(state.shape), np.dtype(state.dtype))
    return cast("ExpectedState", state)


def part_of(state: object, name: str, shape: tuple[int, ...], start: int, part: tuple[int, ...]) -> object:
    """Return a block's part of a state that was saved.

    Args:
        state: of the whole key.
        name: of the key.
        shape: of the key.
        start: the block's first element.
        part: the block's shape.

    Raises:
        UsageError: the state is that of another array.
    """
    if isinstance(state, (list, tuple)):
        return tuple(part_of(member, name, shape, start, part) for member in state)
    if not isinstance(state, mx.nd.NDArray):
        return state
    size = math.prod(part)
    if tuple(state.shape) == shape and state.stype == "row_sparse":
        first, count = start // max(1, math.prod(shape[1:])), part[0]
        chosen = Rows(state.indices.asnumpy(), state.data.asnumpy()).between(first, first + count)
        rows = Rows(np.empty(0, np.int64), np.empty(0)) if chosen is None else chosen
        return filled_rows(part, state.dtype, rows)
    if size == math.prod(shape):
        return state.copy()
    if tuple(state.shape) != shape:
        raise UsageError(
            f"load_optimizer_states: the file has a state of shape {tuple(state.shape)} for key {name!r}, "
            f"which has shape {shape}"
        )
    values = state.asnumpy().reshape(-1)[start : start + size].reshape(part)
    return mx.nd.array(values, ctx=mx.cpu(), dtype=state.dtype)


def _plain(state: object) -> RuleState:
    """Return an optimizer's state to send; waits until it has been computed."""
    if isinstance(state, (list, tuple)):
        return SeveralStates([_plain(member) for member in state])
    if isinstance(state, mx.nd.NDArray):
        rows = state.indices.asnumpy().tobytes() if state.stype == "row_sparse" else None
        values = (state if rows is None else state.data).asnumpy()
        return ArrayState(tuple(state.shape), values.dtype.name, values.tobytes(), rows)
    if state is None or isinstance(state, (bool, int, float)):
        return state
    raise UsageError(
        f"the optimizer has a state of type {type(state).__name__}, which cannot be sent to another rank: "
        "expected arrays, numbers, None, and tuples of these"
    )


# The update rule of a rank that owns blocks: MXNet's optimizer, applied to one block at a time.
#
# It uses a copy of the script's optimizer. The script may set its own to another learning rate at any time,
# while a gradient belongs to the rate of the rank that pushed it. So what scripts change between steps
# (learning rate, gradient scale) is sent with each push, and the rest is compared.

_BY_ELEMENT: Final = frozenset(
    getattr(mx.optimizer, name)
    for name in (
        "SGD",
        "Signum",
        "FTML",
        "DCASGD",
        "NAG",
        "SGLD",
        "ccSGD",
        "Adam",
        "AdaGrad",
        "RMSProp",
        "AdaDelta",
        "Ftrl",
        "Adamax",
    )
)
"""Optimizers that treat each element alone, so that a key may be updated in parts. LARS, LBSGD and LAMB take
norms, GroupAdaGrad needs whole rows, and Nadam counts the updates of all keys. What a user's own class does
is not known.
"""

_LIVE: Final = ("lr", "rescale_grad")
"""What scripts change between steps."""

_SHARED: Final = ("param_dict", "lr_mult", "wd_mult", "idx2name")
"""What Trainer and Module may set later. It is only read here."""


class BlockPlace(NamedTuple):
    """The place of a block in its key."""

    key: int | str
    """The user's."""
    block: int
    shape: tuple[int, ...]
    """Of the key."""
    start: int
    """The block's first element."""


class OwnedRule:
    """What happens to a block when a gradient arrives.

    Attributes:
        fingerprint: of the rule; all ranks must have the same.
        whole: it needs whole tensors.
        compensates: it asks on which value a gradient was computed: call `update_compensated`.
    """

    def __init__(self, rule: CalledUpdater, *, elastic: bool = False) -> None:
        """Make it of the rule that the script has set. In an elastic job ranks that join later have loaded no
        states, so where these come from is not compared.
        """
        origin = f" from {rule.origin}" if elastic else ""
        self.fingerprint: Final = rule.fixed_fingerprint.removesuffix(origin)
        self._updater: Final = rule.updater
        self._script: Final = rule.optimizer
        """The script's optimizer; None: the rule is a function."""
        self.whole: Final = type(self._script) not in _BY_ELEMENT
        self.compensates: Final = type(self._script) is mx.optimizer.DCASGD
        self._own: Final = None if self._script is None else _copy(self._script)
        self._states: dict[tuple[int | str, int], object] = {}
        self._loaded: Final[dict[int | str, object]] = dict(rule.of_states.states) if rule.of_states else {}
        """The states of whole keys that a file had."""
        self._counts: Final[dict[int | str, int]] = dict(
            self._script._all_index_update_counts.get(0, {}) if self._script else {}
        )
        """Updates before this job's, by key."""
        if self._own is not None:
            self._own._all_index_update_counts = {}

    @property
    def begins_with_states(self) -> bool:
        """Whether there are states or counts of an earlier job."""
        return bool(self._loaded or self._counts)

    def live(self) -> tuple[float, ...]:
        """Return what the script has set at this moment: learning rate and gradient scale."""
        return tuple(float(getattr(self._script, name)) for name in _LIVE) if self._script else ()

    def update(self, place: BlockPlace, gradient: NDArray, stored: NDArray, live: tuple[float, ...]) -> None:
        """Queue the update of a block. `live` is what the script of the pushing rank had set."""
        key = place.key
        if self._own is None:
            self._updater(key, gradient, stored)
            return
        own = self._own
        state = self._prepare(own, place, stored, live)
        with queueing(own):
            if own.aggregate_num > 0:
                own.update_multi_precision((key,), (stored,), (gradient,), [state])
            else:
                own.update_multi_precision(key, stored, gradient, state)

    def update_compensated(
        self, place: BlockPlace, gradient: NDArray, stored: NDArray, live: tuple[float, ...], base: NDArray
    ) -> None:
        """Queue the update of a block with a gradient that was computed on the value `base`."""
        own = self._own
        assert own is not None
        state = self._prepare(own, place, stored, live)
        compensated_update(own, place.key, stored, gradient, state, base=base)

    def _prepare(
        self, own: mx.optimizer.Optimizer, place: BlockPlace, stored: NDArray, live: tuple[float, ...]
    ) -> object:
        """Set the optimizer to what the pushing rank had set; return the block's state."""
        if len(live) != len(_LIVE):
            raise UsageError(f"a push of {place.key!r} came with {live}; expected {' and '.join(_LIVE)}")
        for name, value in zip(_LIVE, live, strict=True):
            setattr(own, name, value)
        for name in _SHARED:
            setattr(own, name, getattr(self._script, name))
        return self._state(own, place, stored)

    def encoded_state(self, place: BlockPlace, stored: NDArray) -> bytes:
        """Return the encoded `OptimizerState` of a block; waits until it has been computed. Nothing is known
        of the state of a function.
        """
        own = self._own
        if own is None:
            return b""
        begun = (place.key, place.block) in self._states or place.key in self._loaded
        state = self._state(own, place, stored)
        if not begun:
            del self._states[place.key, place.block]  # whoever asks next gets the same answer
        updates = own._index_update_count.get(place.key, 0)
        return encoded_state(OptimizerState(_plain(state), begun, updates, own.num_update))

    def problem_of(self, place: BlockPlace, like: NDArray, encoded: bytes) -> str:
        """Return why `take_state` could not take these bytes, for a person; empty: it can.

        Args:
            place: of the block.
            like: an array of the block's shape and type.
            encoded: as another rank has sent it.
        """
        own = self._own
        if own is None:
            return f"{len(encoded)} bytes: expected none of {self.fingerprint}" if encoded else ""
        try:
            sent = decoded_state(encoded)
        except ProtocolViolation as error:
            return str(error)
        if not sent.begun:
            return ""
        made = _form_of(own.create_state_multi_precision(place.key, like))
        problem = problem_of_state(sent.state, made)
        if problem and place.key in self._loaded:
            as_loaded = _form_of(self._begun(place, like))
            if not problem_of_state(sent.state, as_loaded):
                return ""
        return f"{problem} of {self.fingerprint}" if problem else ""

    def take_state(self, place: BlockPlace, stored: NDArray, encoded: bytes) -> None:
        """Go on with a block from what another rank's `encoded_state` has given; empty: from its begin."""
        own = self._own
        if own is None:
            return
        self.drop_state(place)
        if encoded:
            sent = decoded_state(encoded)
            self._counts_of(own, place.block)[place.key] = sent.updates
            own.num_update = max(own.num_update, sent.all_updates)
            if sent.begun:
                self._states[place.key, place.block] = arrays_of(joined([sent.state], tuple(stored.shape)))

    def drop_state(self, place: BlockPlace) -> None:
        """Forget a block's state, and its count of updates."""
        self._states.pop((place.key, place.block), None)
        if self._own is not None:
            counts = self._counts_of(self._own, place.block)
            counts.pop(place.key, None)
            if place.key in self._counts:
                counts[place.key] = self._counts[place.key]

    def _counts_of(self, own: mx.optimizer.Optimizer, block: int) -> dict[int | str, int]:
        """Return the counts of updates of the blocks with a number, by key."""
        # MXNet counts updates by device, since several devices may update a key. Here a block is a "device".
        counts: dict[int | str, int] = own._all_index_update_counts.setdefault(block, dict(self._counts))
        return counts

    def _state(self, own: mx.optimizer.Optimizer, place: BlockPlace, stored: NDArray) -> object:
        """Return a block's state, and have the optimizer count this block's updates from here on."""
        key, block = place.key, place.block
        self._counts_of(own, block)
        own._set_current_context(block)
        if (key, block) not in self._states:
            in_file = key in self._loaded
            self._states[key, block] = (
                self._begun(place, stored) if in_file else own.create_state_multi_precision(key, stored)
            )
        return self._states[key, block]

    def _begun(self, place: BlockPlace, stored: NDArray) -> object:
        """Return a block's part of the state that a file had of its key."""
        return part_of(self._loaded[place.key], str(place.key), place.shape, place.start, tuple(stored.shape))


def with_counts(
    optimizer: mx.optimizer.Optimizer, counts: dict[int | str, int], all_updates: int
) -> mx.optimizer.Optimizer:
    """Return a copy of an optimizer with other counts of updates, by key, for a file in MXNet's format."""
    own = _copy(optimizer)
    own._index_update_count.update(counts)
    own.num_update = all_updates
    return own


def _copy(optimizer: mx.optimizer.Optimizer) -> mx.optimizer.Optimizer:
    """Return a copy of an optimizer that has counts of its own."""
    own = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if isinstance(value, dict) and name not in _SHARED:
            setattr(own, name, dict(value))
    own.lr_scheduler = copy.deepcopy(optimizer.lr_scheduler)
    own._all_index_update_counts = {0: {}}  # there is no other way to begin anew
    own._index_update_count = own._all_index_update_counts[0]
    return own

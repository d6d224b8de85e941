"""The blocks that this rank owns, in MXNet's arrays, and the thread that applies pushes to them.

An optimizer is Python code that queues operations on MXNet's engine, and some optimizers wait for values.
Other ranks' gradients must not block the script's thread, nor an optimizer the I/O thread. So updates have a
thread of their own. When a rank pulls a value, the engine makes a copy behind the updates that belong in it.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from netstorm.compression.sparse import Rows
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays import filled_rows, memory_of, rows_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.updates import CalledUpdater
from netstorm.kvstore.asynchronous.blocks import MOST_COUNTED, Gradient, chunks_of, extent, has_whole_rows
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.runtime import Runtime, after_close
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.frames import Buffer

__all__ = ["BlockPlace", "OwnedRule", "Owner", "decode", "joined", "with_counts"]


_JOIN_S: Final = 10.0
"""For an update to end, when this process does."""

_log = logging.getLogger(__name__)


class Owner:
    """All blocks that one store owns on this rank."""

    def __init__(self, runtime: Runtime, rule: OwnedRule) -> None:
        """Begin with no blocks; `rule` updates them."""
        self.rule = rule
        """May be replaced while no rank has a push or pull outstanding."""
        self.runtime: Final = runtime
        self._calls: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: Final = threading.Thread(target=self._run, name="netstorm-owner", daemon=True)
        self._thread.start()
        after_close(self.stop)

    def own(self, key: Key, user_key: int | str, initial: Array) -> None:
        """Copy this rank's blocks of a key's initial value, and begin to serve them. In an elastic job any
        block may be this rank's later, so all of the value is copied.

        The key is known to the job. `initial` must not change before this returns.
        """
        node, whole = self.runtime.node, self.rule.whole
        owners, values = node.asynchronous.owners, _InitialValue(key, whole=whole)
        for block in owners.blocks(key, whole=whole):
            if node.live.is_elastic or owners.owner(key, block) == self.runtime.rank:
                values.keep(block, initial)

        def serve() -> None:
            blocks = _BlockStore(self, key, user_key, values, elastic=node.live.is_elastic)
            self.runtime.post(lambda node, _: node.asynchronous.serve(key, blocks))

        self.call(serve)

    def call(self, function: Callable[[], None]) -> None:
        """Have the owner's thread call a function. From any thread; does not wait."""
        self._calls.put(function)

    def stop(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 -- a user's rule may fail in any way
                _log.exception("an update of a block that this rank owns has failed")
                self.runtime.fail(f"its update rule has failed: {type(error).__name__}: {error}")


class _InitialValue:
    """Blocks of the value that all ranks begin with."""

    def __init__(self, key: Key, *, whole: bool) -> None:
        self._key: Final = key
        self._whole: Final = whole
        self._blocks: Final[dict[int, Array]] = {}

    def keep(self, block: int, value: Array) -> None:
        """Keep a block of a key's value."""
        chunks = chunks_of(self._key, block, whole=self._whole)
        self._blocks[block] = value[extent(self._key, chunks[0])[0] : extent(self._key, chunks[-1])[1]].copy()

    def of(self, block: int) -> Array:
        """Return a block that is kept."""
        return self._blocks[block]

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks that are kept."""
        return iter(self._blocks)


class _BlockStore:
    """The blocks of one key. See `netstorm.kvstore.asynchronous.blocks.BlockStore`.

    Only the owner's thread touches blocks, so calls about a block take effect in their order.
    """

    def __init__(
        self, owner: Owner, key: Key, user_key: int | str, initial: _InitialValue, *, elastic: bool
    ) -> None:
        """Begin with the blocks in `initial`, or in an elastic job without any: they are installed later."""
        self._owner: Final = owner
        self._key: Final = key
        self._user_key: Final = user_key
        self._initial: Final = initial if elastic or owner.rule.compensates else None
        """What all ranks began with; kept for rules that ask what a gradient was computed on, too."""
        self._blocks: Final = {} if elastic else {block: self._stored(initial.of(block)) for block in initial}
        self._unchanged_owner: Final = set(self._blocks)
        """Blocks that were this rank's from their initial value on."""
        self._pulled: Final[dict[tuple[int, int], Buffer]] = {}
        """What each rank has got last, by block and rank."""

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._owner.rule.fingerprint

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""
        return self._owner.rule.whole

    @property
    def begins_with_states(self) -> bool:
        """Whether the rule has states or counts of earlier jobs."""
        return self._owner.rule.begins_with_states

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Have a block updated by the owner's thread."""
        pulled = self._pulled.get((block, rank))

        def update() -> None:
            stored = self._blocks[block]
            if isinstance(gradient, Rows):
                array = filled_rows(tuple(stored.shape), self._key.dtype, gradient)
            else:
                array = self._array_of(gradient)
            rule = self._owner.rule
            if rule.compensates:
                rule.update_compensated(
                    self._place(block), array, stored, live, self._base(block, pulled, stored)
                )
            else:
                rule.update(self._place(block), array, stored, live)
            # The gradient has been copied. An operation that reads the block waits for the update.
            self._post(done)

        self._owner.call(update)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Have the engine copy a block, behind the updates that are queued."""
        runtime, name = self._owner.runtime, self._key.name

        def read() -> None:
            stored = self._blocks[block]

            def start(completion: Completion) -> None:
                if stored.stype == "row_sparse":
                    copy: Array = rows_of(stored).values.reshape(-1).copy()
                else:
                    copy = np.frombuffer(memory_of(stored), np.uint8).copy()
                completion.succeed()
                self._post(lambda: done(copy))

            push_async(start, reads=(stored,), writes=(), name="netstorm_read", skipped=skipped)

        def skipped() -> None:
            runtime.fail(f"an update of key {name!r}, of which it is an owner, has failed")

        self._owner.call(read)

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Keep what a rank gets, if the rule asks what a gradient was computed on. Ranks that get the same
        value share it.
        """
        if self._owner.rule.compensates:
            self._pulled[block, rank] = value

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Have the owner's thread encode the optimizer's state of a block."""

        def encode() -> None:
            state = self._owner.rule.encoded_state(self._place(block), self._blocks[block])
            self._post(lambda: done(state))

        self._owner.call(encode)

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Have the owner's thread compare a state with one that the optimizer makes."""

        def compare() -> None:
            assert self._initial is not None
            like = self._stored(self._initial.of(block))
            problem = self._owner.rule.problem_of(self._place(block), like, states)
            self._post(lambda: done(problem))

        self._owner.call(compare)

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Have the owner's thread begin to hold a block, with the initial value or another owner's state.

        What ranks have pulled of it is not known then: their next gradients are not corrected.
        """
        self._forget_pulled(block)

        def begin() -> None:
            initial = self._initial
            if values is not None:
                value = np.frombuffer(values, self._key.dtype)
                self._unchanged_owner.discard(block)
            else:
                assert initial is not None
                value = initial.of(block)
                self._unchanged_owner.add(block)
            stored = self._blocks[block] = self._stored(value)
            self._owner.rule.take_state(self._place(block), stored, states)

        self._owner.call(begin)

    def discard(self, block: int) -> None:
        """Have the owner's thread drop a block."""
        self._forget_pulled(block)

        def drop() -> None:
            self._owner.rule.drop_state(self._place(block))
            self._blocks.pop(block, None)

        self._owner.call(drop)

    def _forget_pulled(self, block: int) -> None:
        for place in [place for place in self._pulled if place[0] == block]:
            del self._pulled[place]

    def _place(self, block: int) -> BlockPlace:
        key = self._key
        return BlockPlace(self._user_key, block, key.spec.shape, extent(key, block)[0])

    def _base(self, block: int, pulled: Buffer | None, stored: NDArray) -> NDArray:
        """Return the value that a gradient was computed on: as its rank has pulled it, else the initial one.
        Where neither is known, since this rule has followed another one, or this owner, it is the present
        one.
        """
        if pulled is not None:
            return self._array_of(np.frombuffer(pulled, self._key.dtype))
        if self._initial is not None and block in self._unchanged_owner:
            return self._array_of(self._initial.of(block))
        return stored.copy()

    def _stored(self, values: Array) -> NDArray:
        """Return a copy of a block's values: row-sparse, with all rows, if the key is."""
        if self._key.spec.form != ROW_SPARSE:
            return self._array_of(values)
        shape = self._shape(values.size)
        return filled_rows(shape, self._key.dtype, Rows(np.arange(shape[0]), values))

    def _array_of(self, values: Array) -> NDArray:
        """Return a copy of dense values of a block, in its shape."""
        return mx.nd.array(values.reshape(self._shape(values.size)), ctx=mx.cpu(), dtype=self._key.dtype)

    def _shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a block of `size` elements: that of its rows, if these are whole."""
        shape = self._key.spec.shape
        if not shape or not (size == self._key.elements or has_whole_rows(self._key)):
            return (size,)
        return (size // row_length(shape), *shape[1:])

    def _post(self, function: Callable[[], None]) -> None:
        self._owner.runtime.post(lambda _node, _now: function())


# DCASGD on owners: gradients are corrected for what others have changed since they were computed.
#
# A gradient g of rank m was computed on the value that m has pulled, w_bak(m). On the value w that it is
# applied to, it would have been about g + λ g⊙g⊙(w - w_bak(m)) (Zheng et al., "Asynchronous Stochastic
# Gradient Descent with Delay Compensation", ICML 2017, equation 10 and algorithm 2).
#
# `mx.optimizer.DCASGD` has one previous weight for all ranks, which is that before the last update by
# whomever. It so corrects even the gradients of a rank that trains alone, and with a momentum it fails on
# every array of more than one element. So owners take its hyper-parameters and its states, and update as
# the paper says. Where there is a momentum, it is over corrected gradients, as in MXNet.


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
        found = gradient.tostype("default").astype(target.dtype) * rule.rescale_grad
        if rule.clip_gradient is not None:
            found = mx.nd.clip(found, -rule.clip_gradient, rule.clip_gradient)
        found = found + rule.lamda * found * found * (target - previous) + decay * target
        if momentum is None:
            target -= rate * found
        else:
            momentum *= rule.momentum
            momentum -= rate * found
            target += momentum
        if target is not weight:
            weight[:] = target.astype(weight.dtype)


# An optimizer's state of a key that several ranks own blocks of: divided, sent, and joined.
#
# A state is what `create_state` of an `mx.optimizer.Optimizer` returns: an array, nothing, a number, or a
# tuple of these. Arrays that have a value for each element of the key are divided as the key is. Other
# states belong to an optimizer that needs whole tensors, whose keys have one owner each. Numbers and arrays
# are sent as MessagePack; nothing is pickled.


class _Array(msgspec.Struct, tag="array", array_like=True):
    shape: tuple[int, ...]
    dtype: str
    values: bytes
    rows: bytes | None = None
    """Numbers of the rows, int64, if it is row-sparse."""


class _Several(msgspec.Struct, tag="several", array_like=True):
    states: list[_State]


_State: TypeAlias = _Array | _Several | bool | int | float | None


class OptimizerState(msgspec.Struct):
    """The optimizer's state of one block, and its counts of updates."""

    state: _State
    begun: bool
    """There has been an update, or the state comes from a file."""
    updates: int
    """Of this block."""
    all_updates: int
    """The most of any key, as the optimizer counts; a learning rate scheduler depends on it."""

    @classmethod
    def of(cls, state: object, *, begun: bool, updates: int, all_updates: int) -> OptimizerState:
        """Describe an optimizer's state; waits until it has been computed."""
        return cls(_plain(state), begun, updates, all_updates)


def encode(state: OptimizerState) -> bytes:
    """Return the bytes to send."""
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> OptimizerState:
    """Return what `encode` was given.

    Raises:
        ProtocolViolation: these bytes do not come from there.
    """
    try:
        found = msgspec.msgpack.decode(data, type=OptimizerState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(
            f"{len(data)} bytes that are no optimizer's state, in MessagePack, with its counts: {error}"
        ) from None
    if (
        not 0
        <= min(found.updates, found.all_updates)
        <= max(found.updates, found.all_updates)
        <= MOST_COUNTED
    ):
        raise ProtocolViolation(
            f"counted as {found.updates} and {found.all_updates} updates: expected 0 to {MOST_COUNTED}"
        )
    return found


def problem_of(state: _State, expected: object) -> str:
    """Return how a state differs in its form from one that the optimizer makes, for a person; empty: not at
    all.
    """
    if isinstance(expected, (list, tuple)):
        if not isinstance(state, _Several) or len(state.states) != len(expected):
            return f"{_form(state)}: expected {len(expected)} states"
        pairs = zip(state.states, expected, strict=True)
        return next(filter(None, (problem_of(one, other) for one, other in pairs)), "")
    if isinstance(expected, mx.nd.NDArray):
        return _problem_of_array(state, tuple(expected.shape), np.dtype(expected.dtype))
    if isinstance(state, (_Array, _Several)):
        return f"{_form(state)}: expected a number or none, like {expected!r}"
    return ""


def _problem_of_array(state: _State, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> str:
    expected = f"expected an array of {dtype.name}, of shape {shape}"
    if not isinstance(state, _Array) or state.shape != shape or state.dtype != dtype.name:
        return f"{_form(state)}: {expected}"
    nbytes = math.prod(shape) * dtype.itemsize
    if state.rows is not None:
        if not shape or len(state.rows) % 8:
            return f"rows with {len(state.rows)} bytes of numbers: {expected}"
        rows = np.frombuffer(state.rows, np.int64)
        if len(rows) and not (rows[0] >= 0 and (rows[1:] > rows[:-1]).all() and rows[-1] < shape[0]):
            return f"{len(rows)} rows whose numbers do not rise from 0 to {shape[0] - 1}: {expected}"
        nbytes = len(rows) * math.prod(shape[1:]) * dtype.itemsize
    return "" if len(state.values) == nbytes else f"{len(state.values)} bytes of values: {expected}"


def _form(state: _State) -> str:
    """Return what a state is, for a person."""
    if isinstance(state, _Several):
        return f"{len(state.states)} states"
    if isinstance(state, _Array):
        return f"an array of {state.dtype[:20]!r}, of shape {state.shape[:8]}"
    return repr(state)


def joined(parts: Sequence[_State], shape: tuple[int, ...]) -> object:
    """Return the state of a whole key.

    Args:
        parts: `BlockState.state` of its blocks, in order; they have the same structure.
        shape: of the key.
    """
    first = parts[0]
    if isinstance(first, _Several):
        tuples = [part.states for part in parts if isinstance(part, _Several)]
        return tuple(joined(members, shape) for members in zip(*tuples, strict=True))
    if not isinstance(first, _Array):
        return first
    arrays = [part for part in parts if isinstance(part, _Array)]
    dtype = np.dtype(first.dtype)
    if any(part.rows is not None for part in arrays):
        return _joined_rows(arrays, shape, dtype)
    values = np.concatenate([np.frombuffer(part.values, dtype) for part in arrays])
    return mx.nd.array(values.reshape(shape if len(parts) > 1 else first.shape), ctx=mx.cpu(), dtype=dtype)


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
        found = Rows(state.indices.asnumpy(), state.data.asnumpy()).between(first, first + count)
        rows = Rows(np.empty(0, np.int64), np.empty(0)) if found is None else found
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


def _plain(state: object) -> _State:
    if isinstance(state, (list, tuple)):
        return _Several([_plain(member) for member in state])
    if isinstance(state, mx.nd.NDArray):
        rows = state.indices.asnumpy().tobytes() if state.stype == "row_sparse" else None
        values = (state if rows is None else state.data).asnumpy()
        return _Array(tuple(state.shape), values.dtype.name, values.tobytes(), rows)
    if state is None or isinstance(state, (bool, int, float)):
        return state
    raise UsageError(
        f"the optimizer has a state of type {type(state).__name__}, which cannot be sent to another rank: "
        "expected arrays, numbers, None, and tuples of these"
    )


def _joined_rows(parts: list[_Array], shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray:
    numbers, values, first = [], [], 0
    for part in parts:
        here = np.arange(part.shape[0]) if part.rows is None else np.frombuffer(part.rows, np.int64)
        numbers.append(first + here)
        values.append(np.frombuffer(part.values, dtype))
        first += part.shape[0]
    rows = np.concatenate(numbers)
    return filled_rows(shape, dtype, Rows(rows, np.concatenate(values).reshape(len(rows), -1)))


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
        """Return the encoded `BlockState` of a block; waits until it has been computed. Nothing is known of
        the state of a function.
        """
        own = self._own
        if own is None:
            return b""
        begun = (place.key, place.block) in self._states or place.key in self._loaded
        state = self._state(own, place, stored)
        if not begun:
            del self._states[place.key, place.block]  # whoever asks next gets the same answer
        updates = own._index_update_count.get(place.key, 0)
        return encode(OptimizerState.of(state, begun=begun, updates=updates, all_updates=own.num_update))

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
            found = decode(encoded)
        except ProtocolViolation as error:
            return str(error)
        if not found.begun:
            return ""
        problem = problem_of(found.state, own.create_state_multi_precision(place.key, like))
        if problem and place.key in self._loaded and not problem_of(found.state, self._begun(place, like)):
            return ""
        return f"{problem} of {self.fingerprint}" if problem else ""

    def take_state(self, place: BlockPlace, stored: NDArray, encoded: bytes) -> None:
        """Go on with a block from what another rank's `encoded_state` has given; empty: from its begin."""
        own = self._own
        if own is None:
            return
        self.drop_state(place)
        if encoded:
            found = decode(encoded)
            self._counts_of(own, place.block)[place.key] = found.updates
            own.num_update = max(own.num_update, found.all_updates)
            if found.begun:
                self._states[place.key, place.block] = joined([found.state], tuple(stored.shape))

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
        found: dict[int | str, int] = own._all_index_update_counts.setdefault(block, dict(self._counts))
        return found

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

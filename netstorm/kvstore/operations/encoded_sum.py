"""The sum of one tensor by a codec: its rounds, one after the other. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from netstorm.compression.codec import AGREED, AnyArray, Codec, Rounds, State
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.values.key import Key

__all__ = ["Agreed", "EncodedSum", "TensorKeys", "encoded_keys"]

Register = Callable[[str, tuple[int, ...], int], Key]
"""Makes a key known to the job, by name, shape and codec."""


class TensorKeys(NamedTuple):
    """The keys of a tensor: its own (None: it has no rounds), and its further ones."""

    keys: tuple[Key | None, ...]
    in_each: tuple[bool, ...]
    """Whether each gradient has a round of it."""

    @property
    def occasional(self) -> list[Key]:
        """Those that only some gradients have a round of. Which ones have, codecs decide alike at all
        ranks.
        """
        return [
            key
            for key, in_each in zip(self.keys, self.in_each, strict=True)
            if not in_each and key is not None
        ]

    @property
    def counting(self) -> Key:
        """The first key that each gradient has a round of."""
        return next(
            key for key, in_each in zip(self.keys, self.in_each, strict=True) if in_each and key is not None
        )


class Agreed(NamedTuple):
    """What a rank needs to make the next sum of a tensor as the others do, if it has joined later. No sum may
    be under way.
    """

    state: AnyArray | None
    """See `compression.codec.AGREED`."""
    rounds: dict[Key, int]
    """The next rounds of the keys that only some gradients have a round of."""

    @classmethod
    def of(cls, keys: TensorKeys, state: State) -> Agreed:
        """Return that of a tensor of which the codec keeps `state`."""
        agreed = state.get(AGREED)
        return cls(
            None if agreed is None else agreed.copy(), {key: key.last_taken + 1 for key in keys.occasional}
        )


def encoded_keys(codec: Codec, own: Key, register: Register) -> TensorKeys:
    """Return the keys of a tensor, for `EncodedSum`.

    Its further ones (`Codec.parts`) are registered, in the same order at all ranks.

    Args:
        codec: of the tensor.
        own: its own key.
        register: registers another one.
    """
    shape = own.spec.shape
    parts = codec.parts(shape)
    further = [register(f"{own.name}/{part.suffix}", (part.elements,), part.codec) for part in parts]
    return TensorKeys(
        (None if codec.form(shape) is None else own, *further), (True, *(part.in_each for part in parts))
    )


class EncodedSum:
    """A gradient on its way through the rounds of its codec.

    The numbers of rounds that each gradient has are taken at once, on the thread that pushes. One sum of a
    tensor must have ended before the next one begins, since a codec keeps a state.
    """

    __slots__ = (
        "_done",
        "_fail",
        "_keys",
        "_last",
        "_later",
        "_numbers",
        "_priority",
        "_rule",
        "_submit",
        "contributors",
    )

    def __init__(
        self,
        keys: TensorKeys,
        *,
        submit: Callable[[Operation], None],
        later: Callable[[Callable[[], None]], None],
        fail: Callable[[str], None],
        priority: int = 0,
        rule: str = "",
    ) -> None:
        """Take the numbers of the rounds.

        Args:
            keys: the tensor's.
            submit: begins an operation.
            later: calls a function soon, on a thread that may compute.
            fail: ends the job, whose other ranks would wait for this one.
            priority: larger goes first on every link.
            rule: fingerprint of what this rank does with the sum, and of the codec.
        """
        self._keys: Final = keys.keys
        self._numbers: Final = [
            key.take_round() if in_each and key is not None else -1
            for key, in_each in zip(keys.keys, keys.in_each, strict=True)
        ]
        self._submit: Final = submit
        self._later: Final = later
        self._fail: Final = fail
        self._done: Done = _nobody
        self._priority: Final = priority
        self._rule: Final = rule
        self._last: Operation | None = None
        self.contributors = 0
        """Bit set of the ranks whose values are in all of the last round."""

    @property
    def number(self) -> int:
        """The number of the first round."""
        return next(number for number in self._numbers if number >= 0)

    def counted(self, elements: int) -> list[tuple[slice, int]]:
        """Return the bit set of the ranks whose values are in each part of the tensor's sum, so many
        elements.

        There are several parts only if a rank left or joined the job meanwhile, and if the last round was one
        of the tensor's own key.
        """
        last = self._last
        if last is None or len(last.contributors) == 1 or last.key is not self._keys[0]:
            return [(slice(0, elements), self.contributors)]
        return [(slice(start, end), ranks) for start, end, ranks in _parts(last)]

    def begin(self, rounds: Rounds, done: Done) -> None:
        """Begin the first round, on a thread that may compute.

        Args:
            rounds: of the codec.
            done: called once, from any thread: None, or why there is no sum.
        """
        self._done = done
        self._go_on(rounds, None)

    def _go_on(self, rounds: Rounds, ranks: int | None) -> None:
        try:
            transfer = next(rounds) if ranks is None else rounds.send(ranks)
        except StopIteration:
            self._done(None)
            return
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others must hear of it
            names = " and ".join(repr(key.name) for key in self._keys if key is not None)
            self._fail(f"what key {names} sums cannot be encoded: {error}")
            self._done(error)
            return
        key = self._keys[transfer.part]
        assert key is not None, f"part {transfer.part} has no rounds"
        form, number = key.form_of(transfer.codec), self._numbers[transfer.part]
        assert form is not None, f"key {key.name!r} has no codec {transfer.codec}"

        def ended(error: Exception | None) -> None:
            if error is not None:
                rounds.close()
                self._done(error)
                return
            self._last = operation
            if transfer.counted is not None:
                transfer.counted.extend(_parts(operation))
            self.contributors = -1
            for bits in operation.contributors:
                self.contributors &= bits
            fewest = min((bits.bit_count() for bits in operation.contributors), default=0)
            self._later(lambda: self._go_on(rounds, fewest))

        operation = Operation(
            key=key,
            round=key.take_round() if number < 0 else number,
            source=transfer.source,
            destination=transfer.destination,
            done=ended,
            priority=self._priority,
            rule=self._rule,
            form=form,
        )
        self._submit(operation)


def _parts(operation: Operation) -> list[tuple[int, int, int]]:
    """Return first element, end and contributors of each chunk of a result."""
    assert operation.key.layout is not None, "its round is done"
    return [
        (*bounds, ranks)
        for ranks, chunks in operation.contributors.items()
        for chunk, bounds in enumerate(operation.key.layout.bounds)
        if chunks >> chunk & 1
    ]


def _nobody(error: Exception | None) -> None:
    """Hear of the end of a sum that has not begun."""

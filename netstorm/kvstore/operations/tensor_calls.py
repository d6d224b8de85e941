"""The sums of named tensors by codecs that one process group makes at one rank, as rounds of keys. Pure.

Each tensor has keys of its own (`encoded_keys`), and its n-th sum is the n-th of every member. A rank that
joins later goes on where the others are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

import numpy as np

from netstorm.compression.codec import AGREED, Codec, State
from netstorm.kvstore.operations.encoded_sum import TensorKeys, encoded_keys
from netstorm.kvstore.operations.group_calls import Position
from netstorm.kvstore.values.key import Key

__all__ = ["TensorCalls"]

Register = Callable[[str, tuple[int, ...], int, tuple[int, ...]], Key]
"""Makes a key known to the job, by name, shape, codec and members (none: all ranks)."""


class TensorCalls:
    """Numbers the sums of each tensor, in the order of the program."""

    def __init__(self, name: str, members: tuple[int, ...], *, size: int, register: Register) -> None:
        """Begin without tensors.

        Args:
            name: begins the names of all keys; the same at every member, and no other group's.
            members: the group's ranks in the job, by rank within the group.
            size: ranks of the job.
            register: registers a key.
        """
        self.name: Final = name
        self.members: Final = members
        self.called = 0
        """How many sums have begun."""
        self._key_members: Final = () if len(members) == size else tuple(sorted(members))
        self._register: Final = register
        self._tensors: Final[dict[str, TensorKeys]] = {}
        self._keys: Final[dict[int, Key]] = {}
        """By checksum of the name."""
        self._first: dict[int, int] = {}
        """Of a key that is not registered yet: its first round here."""
        self._states: Final[dict[int, State]] = {}
        """By checksum of the name of a tensor's own key: what its codec keeps."""
        self._agreed: dict[int, list[float]] = {}
        """Of tensors that have not been summed here yet: what the others' codecs have agreed on."""

    @property
    def of_all_ranks(self) -> bool:
        """Whether all ranks of the job are members."""
        return not self._key_members

    def keys_of(
        self, tensor: str, shape: tuple[int, ...], codec: Codec, state: State | None = None
    ) -> TensorKeys:
        """Return the keys for a tensor's next sum.

        Args:
            tensor: its name, the same at every member.
            shape: of the tensor.
            codec: how it travels; always the same one.
            state: what the codec keeps of the tensor; gets what ranks agreed on before this one joined. None:
                nobody who joins later will be told.
        """
        self.called += 1
        name = f"{self.name}/{tensor}"
        if state is not None:
            number = crc32(name.encode())
            self._states[number] = state
            if number in self._agreed:
                state[AGREED] = np.array(self._agreed.pop(number))
        keys = self._tensors.get(tensor)
        if keys is None:
            form = codec.form(shape)
            own = Key(0, name, shape, "float32") if form is None else self._new(name, shape, form)
            keys = self._tensors[tensor] = encoded_keys(codec, own, self._new)
        return keys

    def position(self) -> Position:
        """Return where the sums are. None may be under way."""
        rounds = self._first | {number: key.last_taken + 1 for number, key in self._keys.items()}
        agreed = self._agreed | {
            number: state[AGREED].tolist() for number, state in self._states.items() if AGREED in state
        }
        return Position(self.called, dict(sorted(rounds.items())), dict(sorted(agreed.items())))

    def go_on_at(self, position: Position) -> None:
        """Go on where another member is: this rank has joined later."""
        self.called = position.called
        self._first = dict(position.rounds)
        self._agreed = dict(position.agreed)
        for number, key in self._keys.items():
            key.begin_at(position.rounds.get(number, 0))

    def next_rounds(self) -> dict[int, int]:
        """Return the next round of each key that has been granted, by the key's number."""
        return {key.identity: key.last_taken + 1 for key in self._keys.values() if key.identity >= 0}

    def _new(self, name: str, shape: tuple[int, ...], form: int) -> Key:
        number = crc32(name.encode())
        key = self._register(name, shape, form, self._key_members)
        key.begin_at(self._first.get(number, 0))
        self._keys[number] = key
        return key

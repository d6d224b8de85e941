"""What one rank needs to save asynchronous training by itself: what owners hold, and whether it is its turn.

In an elastic job ranks have no step in common, and none may wait for all others. So one rank asks the owners
of all blocks. Each block comes with the states of its update rule, as both were between two updates. Other
blocks may have been updated a little more or less often by then, as in a pull.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from netstorm.errors import ProtocolViolation, WaitTimeout
from netstorm.kvstore.asynchronous.owners import chunks_of, extent
from netstorm.kvstore.operations.asynchronous import Pushes, StatesOperation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Array, Key

__all__ = ["HeldKey", "SavingRank", "collect_from_owners"]

_Bytes: TypeAlias = bytes | bytearray | memoryview

_SLICE_S: Final = 0.2
"""Waits are cut into slices, in which Python's signal handlers run."""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """What the owners of a key hold."""

    values: Array
    """All of them, flat."""
    states: dict[int, bytes]
    """Of the update rule, by block."""


def collect_from_owners(
    runtime: Runtime, keys: Sequence[tuple[Key, Pushes]], *, whole: bool
) -> list[HeldKey]:
    """Return what owners hold of some keys, with all earlier pushes of this rank.

    Args:
        runtime: of this process.
        keys: with this rank's counts of pushes and pulls.
        whole: blocks are whole keys.

    Raises:
        WaitTimeout: no answer of an owner within NETSTORM_WAIT_TIMEOUT.
        NetStormError: the job has failed.
    """
    found: list[dict[int, bytes]] = []
    waits: list[concurrent.futures.Future[Exception | None]] = []
    for key, pushes in keys:
        future: concurrent.futures.Future[Exception | None] = concurrent.futures.Future()
        operation = StatesOperation(
            key=key,
            number=pushes.pulls,
            pushed=pushes.total,
            destination={},
            with_values=True,
            whole=whole,
            done=future.set_result,
        )
        pushes.pulls += 1
        found.append(operation.destination)
        waits.append(future)
        runtime.submit(operation)
    _wait(runtime, waits)
    return [_divided(key, blocks, whole=whole) for (key, _), blocks in zip(keys, found, strict=True)]


def _wait(runtime: Runtime, futures: Sequence[concurrent.futures.Future[Exception | None]]) -> None:
    limit_s = runtime.settings.wait_timeout_s
    waited = 0.0
    while concurrent.futures.wait(futures, _SLICE_S).not_done:
        runtime.check()
        waited += _SLICE_S
        if waited > limit_s:
            raise WaitTimeout(
                f"no answer of an owner of parameters within {limit_s:g} s (NETSTORM_WAIT_TIMEOUT): what it "
                "holds cannot be saved"
            )
    for future in futures:
        error = future.result()
        if error is not None:
            raise error


def _divided(key: Key, blocks: Mapping[int, bytes], *, whole: bool) -> HeldKey:
    """Return the values and the states in blocks that consist of both."""
    values = np.zeros(key.elements, key.dtype)
    states = {}
    for block, data in blocks.items():
        chunks = chunks_of(key, block, whole=whole)
        begin, end = extent(key, chunks[0])[0], extent(key, chunks[-1])[1]
        size = (end - begin) * key.dtype.itemsize
        if len(data) < size:
            raise ProtocolViolation(
                f"block {block} of key {key.name!r} has come from its owner with {len(data)} bytes: its "
                f"values alone have {size}"
            )
        values[begin:end] = np.frombuffer(data, key.dtype, end - begin)
        states[block] = data[size:]
    return HeldKey(values, states)


class SavingRank:
    """A rank that writes a checkpoint alone. Its methods are those of `netstorm.checkpoint`'s `Ranks`."""

    writes_alone: Final = True

    def __init__(self, runtime: Runtime) -> None:
        """Prepare; nothing is sent."""
        self._runtime: Final = runtime

    @property
    def is_due(self) -> bool:
        """Whether this rank saves: the lowest of those that take part and whose programs have not ended."""
        training = self._runtime.node.requests.live.training
        return bool(training) and training[0] == self.rank

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._runtime.rank

    def incarnations(self) -> dict[int, int]:
        """Return this rank alone: nobody else is waited for."""
        return {self.rank: 0}

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return this rank's numbers."""
        return {self.rank: tuple(numbers)}

    def from_rank(self, rank: int, size: int, data: _Bytes | None) -> _Bytes:
        """Raise an error: nobody sends anything."""
        raise NotImplementedError(
            f"{size} bytes of rank {rank} for a checkpoint that rank {self.rank} writes alone"
        )

"""All ranks of a job save a checkpoint together, or load one: what both frontends call."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from netstorm import clock
from netstorm.checkpoint.files import (
    Found,
    ShareWriter,
    claim_step,
    complete_by_step,
    find_checkpoint,
    read_files,
)
from netstorm.checkpoint.format import (
    Bytes,
    Description,
    Index,
    NumpyTensors,
    Size,
    ValueTree,
    checksum,
    decode_files,
    decode_index,
    encode_tensors,
    folder_of_step,
    numbered_file,
    restore,
    shares,
    take_apart,
)
from netstorm.errors import CheckpointError, Disagreement, NetStormError, UsageError, WaitTimeout

__all__ = [
    "JobCheckpoints",
    "Loaded",
    "SaveOptions",
    "Saving",
    "SavingRanks",
    "save_by_one",
    "wait_for_last_saving",
]

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""
_NONE: Final = -1
"""Instead of a step: there is none."""
_ERROR: Final = -2
"""Instead of a step: this rank has failed."""


class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: of the checkpoint.
        path: its folder; it is complete once `wait` has returned.
    """

    def __init__(self, step: int, path: Path, write: Callable[[], Path] | None = None) -> None:
        """Have a thread call `write`; None: there is nothing to write, as another rank writes everything."""
        self.step: Final = step
        self.path: Final = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            # Not a daemon: the last checkpoint of a program is completed before the program ends.
            self._thread = threading.Thread(target=self._run, args=(write,), name="netstorm-checkpoint")
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is complete, or has failed: `wait` then returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Args:
            timeout_s: longest wait; None: as long as it takes, which the save's own time-out limits.

        Raises:
            CheckpointError: why it could not be written, here or at another rank.
            WaitTimeout: the deadline, here or at rank 0, has passed; at rank 0 it names the ranks that are
                missing.
        """
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_SLICE_S)
            if deadline is not None and clock.monotonic() > deadline and not self.is_done:
                raise WaitTimeout(f"{self.path} is not complete after {timeout_s:g} s; it is still written")
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            self._error = error
            _log.error("the checkpoint of step %d was not written: %s", self.step, error)


_last: Saving | None = None


def wait_for_last_saving() -> None:
    """Wait until the checkpoint before has been written, or has failed, which has been logged."""
    while _last is not None and _last._thread is not None and not _last.is_done:  # noqa: SLF001 -- of this module
        _last._thread.join(_SLICE_S)  # noqa: SLF001


def save_by_one(
    path: str | Path, options: SaveOptions, save: Callable[[SaveOptions], Saving], *, is_due: bool
) -> Saving:
    """Have one rank save for all, after the steps that the folder has; the others do nothing.

    Args:
        path: folder of the job's checkpoints.
        options: of the call; `step` is the least one.
        save: begins to write, with the options that the folder allows.
        is_due: this rank is the one.
    """
    if not is_due:
        return Saving(options.step or 0, Path(path))
    wait_for_last_saving()
    return save(replace(options, step=claim_step(path, options.step), shares=False))


class SavingRanks(Protocol):
    """The ranks of the job. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def writes_alone(self) -> bool:
        """Whether this rank writes the checkpoints that one rank writes alone: the lowest that is there."""
        return self.rank == min(self.incarnations(), default=self.rank)

    def incarnations(self) -> Mapping[int, int]:
        """Return who is in the job: by rank, a number that changes with its process. Any thread may ask."""

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of all ranks that take part, by rank, ascending; the same at all of them.

        They have 63 bits, and all ranks give as many. In an elastic job ranks may be missing.
        """

    def from_rank(self, rank: int, size: int, data: Bytes | None) -> Bytes:
        """Return the bytes that one rank gives, writable elsewhere; the others give their number and None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is written; the same at all ranks."""

    step: int | None
    shares: bool
    keep: int | None
    timeout_s: float
    compares_tensors: bool
    """Whether ranks may hold different values of a tensor; rank 0's are then kept."""

    def __post_init__(self) -> None:
        if self.step is not None and not 0 <= self.step < 10**18:
            raise UsageError(f"step={self.step}: expected a number from 0 to 10**18 - 1")
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"keep={self.keep}: expected at least 1, or None to keep all checkpoints")
        if not self.timeout_s > 0:
            raise UsageError(f"timeout_s={self.timeout_s}: expected a time greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that has been read."""

    step: int
    state: object
    own: object
    """What this rank kept for itself; None: nothing, or the job had another number of ranks. What another
    rank kept, if that was asked for."""
    takers: int
    """How many ranks have read it."""
    path: Path
    index: Index


class JobCheckpoints:
    """The checkpoints of one job in one folder."""

    def __init__(
        self, base: str | Path, ranks: SavingRanks, tensors: NumpyTensors, *, framework: str, job: str
    ) -> None:
        self._base: Final = Path(base)
        self._ranks: Final = ranks
        self._tensors: Final = tensors
        self._framework: Final = framework
        self._job: Final = job

    # ------------------------------------------------------------------------------------------------ saving

    def save(
        self, state: object, own: object, options: SaveOptions, *, rounds: Mapping[str, int] | None = None
    ) -> Saving:
        """Copy this rank's share, and have it written by a thread.

        Args:
            state: a tree of tensors and plain values, the same at all ranks.
            own: a tree that this rank keeps for itself; None: nothing.
            options: how.
            rounds: the last round of each key.

        Raises:
            UsageError: something that a checkpoint cannot hold.
            Disagreement: ranks save different states.
        """
        global _last  # noqa: PLW0603 -- one a process
        ranks, adapter = self._ranks, self._tensors
        wait_for_last_saving()
        if not options.shares:
            if own is not None:
                raise UsageError("own= needs shares=True: with shares=False only rank 0 writes")
            if not ranks.writes_alone:
                return Saving(options.step or 0, self._base)
        tree, tensors, described = take_apart(state, adapter)
        step, token, takers = self._agree(tree, described, options, has_own=own is not None)
        differing = self._differing(list(tensors), list(tensors.values()), options, takers)
        folder = self._base / folder_of_step(step)
        if options.shares and ranks.rank not in takers:  # it joined when the others had agreed already
            return Saving(step, folder)
        writers = takers if options.shares else (ranks.rank,)
        place = writers.index(ranks.rank)
        owners = shares(
            [description.bytes for description in described.values()], len(writers), first=differing
        )
        files = [numbered_file("model.safetensors", owner, len(writers), token) for owner in owners]
        mine = {name: described[name] for name, owner in zip(tensors, owners, strict=True) if owner == place}
        own_tree: ValueTree | None = None
        if own is not None:
            own_tree, own_tensors, own_described = take_apart(
                own, adapter, prefix=f"own.{ranks.rank}.", taken=tensors
            )
            tensors, mine = tensors | own_tensors, mine | own_described
        main, present = threading.main_thread(), ranks.incarnations()
        writer = ShareWriter(
            base=self._base,
            index=Index(
                metadata=Size(sum(description.bytes for description in described.values())),
                weight_map=dict(zip(described, files, strict=True)),
                framework=self._framework,
                job=self._job,
                step=step,
                token=token,
                world_size=len(takers),
                written_at=0,
                rounds=dict(rounds or {}),
                files=(),
                state=tree,
                own=(),
            ),
            ranks=writers,
            place=place,
            share=encode_tensors(mine, lambda name: adapter.data(tensors[name])),
            own=own_tree,
            keep=options.keep,
            timeout_s=options.timeout_s,
            is_leaving=lambda: not main.is_alive(),
            has_left=lambda rank: ranks.incarnations().get(rank) != present.get(rank),
        )
        _last = Saving(step, folder, writer.run)
        return _last

    def _agree(
        self, tree: ValueTree, described: Mapping[str, Description], options: SaveOptions, *, has_own: bool
    ) -> tuple[int, str, tuple[int, ...]]:
        """Return the step, the token and the ranks of a checkpoint, after making sure that they save the
        same.
        """
        step = options.step
        if step is None:
            step = max(complete_by_step(self._base), default=-1) + 1
        token = secrets.randbits(48)
        takers: tuple[int, ...] = (self._ranks.rank,)
        if options.shares:
            mine = (
                _NONE if options.step is None else options.step,
                checksum(repr([*described.items()]).encode()),
                checksum(tree.values),
                int(has_own),
            )
            given = self._ranks.gather((*mine, step, token))
            takers = tuple(given)
            first = given[takers[0]]
            for rank, other in given.items():
                _compare(takers[0], first[: len(mine)], rank, other[: len(mine)])
            step, token = first[len(mine) :]
        return step, f"{token:012x}", takers

    def _differing(
        self, names: Sequence[str], tensors: Sequence[object], options: SaveOptions, takers: Sequence[int]
    ) -> set[int]:
        """Return the tensors of which not all ranks have the same bytes; the first rank's are kept."""
        if not (options.compares_tensors and options.shares and len(takers) > 1 and tensors):
            return set()
        sums = self._ranks.gather([checksum(self._tensors.data(tensor)) for tensor in tensors])
        differing = {
            tensor for tensor, others in enumerate(zip(*sums.values(), strict=True)) if len(set(others)) > 1
        }
        if differing:
            _log.info(
                "ranks have different values of %d tensors: rank %d's are kept (%s)",
                len(differing),
                takers[0],
                ", ".join(names[tensor] for tensor in sorted(differing)[:5]),
            )
        return differing

    # ----------------------------------------------------------------------------------------------- loading

    def load(
        self, *, step: int | None, broadcast: bool, missing_ok: bool, lends_own: bool = False
    ) -> Loaded | None:
        """Read a checkpoint, the same at all ranks.

        Args:
            step: which; None: the newest that is complete.
            broadcast: only rank 0 reads, and sends it to the others.
            missing_ok: return None if there is none at all.
            lends_own: if the job had another number of ranks, give each what one of those kept for itself.

        Raises:
            CheckpointError: there is none, or it is damaged, or of another framework.
            Disagreement: ranks see different checkpoints.
        """
        wait_for_last_saving()
        newest: Found | None = None
        error: NetStormError | None = None
        try:
            newest = find_checkpoint(self._base, step)
            if newest is None and not missing_ok:
                raise CheckpointError(f"{self._base} has no checkpoint: nothing can be loaded from it")
            if newest is not None and newest.index.framework != self._framework:
                raise CheckpointError(
                    f"{newest.folder} was written by a program of {newest.index.framework}, and this is one "
                    f"of {self._framework}: give the folder of this job's checkpoints"
                )
        except NetStormError as caught:
            error = caught
        mine = _ERROR if error is not None else _NONE if newest is None else newest.index.step
        seen = self._ranks.gather((mine, 0 if newest is None else checksum(newest.text)))
        takers = tuple(seen)
        chosen_step, digest = seen[takers[0]]
        if chosen_step == _ERROR:
            raise error or CheckpointError(
                f"rank {takers[0]} cannot read the checkpoint; its own error says why"
            )
        if chosen_step == _NONE:
            return None
        index, files = self._read_with_others(chosen_step, digest, takers, broadcast=broadcast)
        slots, own = decode_files(files), None
        if index.own and (lends_own or len(index.own) == len(takers)):
            place = takers.index(self._ranks.rank) % len(index.own)
            own = restore(index.own[place], slots, self._tensors)
        return Loaded(
            step=index.step,
            state=restore(index.state, slots, self._tensors),
            own=own,
            takers=len(takers),
            path=self._base / folder_of_step(index.step),
            index=index,
        )

    def _read_with_others(
        self, step: int, digest: int, takers: Sequence[int], *, broadcast: bool
    ) -> tuple[Index, Sequence[Bytes]]:
        """Return the index and the files that the first rank has chosen at every rank, or raise at every
        rank.
        """
        ranks, first = self._ranks, takers[0]
        chosen: Found | None = None
        files: Sequence[Bytes] = ()
        error: NetStormError | None = None
        if not broadcast or ranks.rank == first:
            try:
                chosen = find_checkpoint(self._base, step)
                if chosen is None or checksum(chosen.text) != digest:
                    raise Disagreement(
                        f"rank {ranks.rank} and rank {first} see different checkpoints of step {step} in "
                        f"{self._base}: it must be on a file system that all ranks share, or else use "
                        "broadcast=True"
                    )
                files = read_files(chosen)
            except NetStormError as caught:
                error = caught
        seen: dict[int, tuple[int, ...]] = {first: (1, 0)}  # unless it is still there
        seen |= ranks.gather((int(error is not None), 0 if chosen is None else len(chosen.text)))
        failed = [rank for rank, (bad, _) in seen.items() if bad]
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(
                f"rank {failed[0]} cannot read the checkpoint of step {step} in {self._base}; its own error "
                "says why. Without a file system that all ranks share use broadcast=True"
            )
        if not broadcast:
            assert chosen is not None
            return chosen.index, files
        text = ranks.from_rank(first, seen[first][1], None if chosen is None else chosen.text)
        index = decode_index(bytes(text), "the index that rank 0 has sent")
        return index, [
            ranks.from_rank(first, file.bytes, files[place] if files else None)
            for place, file in enumerate(index.files)
        ]


def _compare(first: int, expected: Sequence[int], rank: int, given: Sequence[int]) -> None:
    """Raise `Disagreement` if a rank saves something else than the first."""
    if expected[0] != given[0]:
        raise Disagreement(
            f"save: step is {expected[0]} at rank {first} and {given[0]} at rank {rank} (-1: not given)"
        )
    both = f"save: rank {first} and rank {rank} give"
    advice = "a checkpoint in shares holds what is the same at all ranks; use own= for what each rank has"
    if expected[1] != given[1]:
        raise Disagreement(f"{both} tensors of different names, shapes or types: {advice} for itself")
    if expected[2] != given[2]:
        raise Disagreement(
            f"{both} different numbers or texts beside the tensors: {advice} for itself, such as the state "
            "of its random numbers"
        )
    if expected[3] != given[3]:
        raise Disagreement(f"save: of rank {first} and rank {rank} only one gives own=")

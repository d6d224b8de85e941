"""All ranks of a job save a checkpoint together, or load one: what both frontends call."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from netstorm.checkpoint.background import Saving, finished_saving, start_saving, wait_for_last_saving
from netstorm.checkpoint.checksums import Bytes, checksum_number
from netstorm.checkpoint.folder import complete_by_step
from netstorm.checkpoint.layout import Layout
from netstorm.checkpoint.manifest import Manifest, TensorEntry
from netstorm.checkpoint.names import folder_of_step
from netstorm.checkpoint.own_values import decode_own, encode_own
from netstorm.checkpoint.reading import Contents, Found, find_checkpoint, read_checkpoint
from netstorm.checkpoint.tensors import Description, TensorBytes
from netstorm.checkpoint.values import Flat, flatten, unflatten
from netstorm.checkpoint.writing import Outline, ShareWriter
from netstorm.errors import CheckpointError, Disagreement, NetStormError, UsageError

__all__ = ["JobCheckpoints", "Loaded", "Ranks", "SaveOptions"]

_log = logging.getLogger(__name__)

_NONE: Final = -1
"""Instead of a step: there is none."""
_ERROR: Final = -2
"""Instead of a step: this rank has failed."""


class Ranks(Protocol):
    """The ranks of the job. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def writes_alone(self) -> bool:
        """Whether this rank writes the checkpoints that one rank writes alone."""

    def incarnations(self) -> Mapping[int, int]:
        """Return who is in the job: by rank, a number that changes with its process. Any thread may ask."""

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of all ranks that take part, by rank, ascending; the same at all of them.

        They have 63 bits, and all ranks give as many. In an elastic job ranks may be missing.
        """

    def from_rank(self, rank: int, parts: Sequence[Bytes] | None) -> list[Bytes]:
        """Return what one rank gives, writable elsewhere; the others give None."""


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
    manifest: Manifest


class JobCheckpoints:
    """The checkpoints of one job in one folder."""

    def __init__(
        self, base: str | Path, ranks: Ranks, tensors: TensorBytes, *, framework: str, job: str
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
        ranks = self._ranks
        wait_for_last_saving()
        if not options.shares:
            if own is not None:
                raise UsageError("own= needs shares=True: with shares=False only rank 0 writes")
            if not ranks.writes_alone:
                return finished_saving(options.step or 0, self._base)
        flat = flatten(state, self._tensors.is_tensor)
        described = [
            self._tensors.describe(tensor, name)
            for tensor, name in zip(flat.tensors, flat.names, strict=True)
        ]
        step, token, takers = self._agree(flat, described, options, has_own=own is not None)
        differing = self._differing(flat, options, takers)
        if options.shares and ranks.rank not in takers:  # it joined when the others had agreed already
            return finished_saving(step, self._base / folder_of_step(step))
        writers = takers if options.shares else (ranks.rank,)
        layout = Layout.of([one.bytes for one in described], len(writers), rank_0=differing)
        outline = Outline(
            framework=self._framework,
            job=self._job,
            step=step,
            token=token,
            world_size=len(takers),
            ranks=writers,
            rounds=dict(rounds or {}),
            tree=flat.tree,
            tensors=_entries(flat, described, layout),
            total=layout.total,
        )
        main, present = threading.main_thread(), ranks.incarnations()
        place = writers.index(ranks.rank)
        writer = ShareWriter(
            self._base,
            outline,
            place=place,
            begin=layout.cuts[place],
            share=self._copy_share(flat, layout, place),
            own=None if own is None else encode_own(own, self._tensors),
            keep=options.keep,
            timeout_s=options.timeout_s,
            is_leaving=lambda: not main.is_alive(),
            has_left=lambda rank: ranks.incarnations().get(rank) != present.get(rank),
        )
        return start_saving(step, self._base / folder_of_step(step), writer.run)

    def _agree(
        self, flat: Flat, described: Sequence[Description], options: SaveOptions, *, has_own: bool
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
            tensors = repr([(name, *one) for name, one in zip(flat.names, described, strict=True)]).encode()
            mine = (
                _NONE if options.step is None else options.step,
                checksum_number(tensors),
                checksum_number(flat.tree),
                int(has_own),
            )
            found = self._ranks.gather((*mine, step, token))
            takers = tuple(found)
            first = found[takers[0]]
            for rank, other in found.items():
                _compare(takers[0], first[: len(mine)], rank, other[: len(mine)])
            step, token = first[len(mine) :]
        return step, f"{token:012x}", takers

    def _differing(self, flat: Flat, options: SaveOptions, takers: Sequence[int]) -> set[int]:
        """Return the tensors of which not all ranks have the same bytes; the first rank's are kept."""
        if not (options.compares_tensors and options.shares and len(takers) > 1 and flat.tensors):
            return set()
        found = self._ranks.gather([self._tensors.checksum(tensor) for tensor in flat.tensors])
        differing = {
            tensor for tensor, others in enumerate(zip(*found.values(), strict=True)) if len(set(others)) > 1
        }
        if differing:
            names = ", ".join(flat.names[tensor] for tensor in sorted(differing)[:5])
            _log.info(
                "ranks have different values of %d tensors: rank %d's are kept (%s)",
                len(differing),
                takers[0],
                names,
            )
        return differing

    def _copy_share(self, flat: Flat, layout: Layout, place: int) -> bytearray:
        share = bytearray(layout.cuts[place + 1] - layout.cuts[place])
        view = memoryview(share)
        for tensor, begin, end, at in layout.pieces(place):
            self._tensors.copy(flat.tensors[tensor], begin, end, view[at : at + end - begin])
        return share

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
        found: Found | None = None
        error: NetStormError | None = None
        try:
            found = find_checkpoint(self._base, step)
            if found is None and not missing_ok:
                raise CheckpointError(f"{self._base} has no checkpoint: nothing can be loaded from it")
            self._check(found)
        except NetStormError as caught:
            error = caught
        mine = _ERROR if error is not None else _NONE if found is None else found.manifest.step
        seen = self._ranks.gather((mine, found.digest if found is not None else 0))
        takers = tuple(seen)
        chosen_step, digest = seen[takers[0]]
        if chosen_step == _ERROR:
            raise error or CheckpointError(
                f"rank {takers[0]} cannot read the checkpoint; its own error says why"
            )
        if chosen_step == _NONE:
            return None
        contents = self._read_with_others(chosen_step, digest, takers, broadcast=broadcast)
        return self._restored(contents, takers, lends_own=lends_own)

    def _check(self, found: Found | None) -> None:
        if found is not None and found.manifest.framework != self._framework:
            raise CheckpointError(
                f"{found.folder} was written by a program of {found.manifest.framework}, and this is one of "
                f"{self._framework}: give the folder of this job's checkpoints"
            )

    def _read_with_others(
        self, step: int, digest: int, takers: Sequence[int], *, broadcast: bool
    ) -> Contents:
        """Return the contents that the first rank has chosen at every rank, or raise at every rank."""
        ranks, first = self._ranks, takers[0]
        contents: Contents | None = None
        error: NetStormError | None = None
        if not broadcast or ranks.rank == first:
            try:
                found = find_checkpoint(self._base, step)
                if found is None or found.digest != digest:
                    raise Disagreement(
                        f"rank {ranks.rank} and rank {first} see different checkpoints of step {step} in "
                        f"{self._base}: it must be on a file system that all ranks share, or else use "
                        "broadcast=True"
                    )
                contents = read_checkpoint(found)
            except NetStormError as caught:
                error = caught
        failed = [rank for rank, (bad,) in ranks.gather((int(error is not None),)).items() if bad]
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(
                f"rank {failed[0]} cannot read the checkpoint of step {step} in {self._base}; its own error "
                "says why. Without a file system that all ranks share use broadcast=True"
            )
        if broadcast:
            parts = ranks.from_rank(first, None if contents is None else contents.parts())
            contents = contents or Contents.of_parts(parts)
        assert contents is not None
        return contents

    def _restored(self, contents: Contents, takers: Sequence[int], *, lends_own: bool) -> Loaded:
        manifest = contents.manifest
        restored = [
            self._tensors.restore(
                Description(entry.kind, entry.dtype, entry.shape, entry.bytes), contents.tensor(place)
            )
            for place, entry in enumerate(manifest.tensors)
        ]
        own = None
        if contents.own and (lends_own or len(contents.own) == len(takers)):
            place = takers.index(self._ranks.rank) % len(contents.own)
            own = decode_own(contents.own[place], self._tensors)
        return Loaded(
            step=manifest.step,
            state=unflatten(contents.tree, restored),
            own=own,
            takers=len(takers),
            path=self._base / folder_of_step(manifest.step),
            manifest=manifest,
        )


def _entries(flat: Flat, described: Sequence[Description], layout: Layout) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(
            name=name, dtype=one.dtype, shape=one.shape, kind=one.kind, offset=offset, bytes=one.bytes
        )
        for name, one, offset in zip(flat.names, described, layout.offsets, strict=True)
    )


def _compare(first: int, expected: Sequence[int], rank: int, given: Sequence[int]) -> None:
    """Raise `Disagreement` if a rank saves something else than the first."""
    if expected[0] != given[0]:
        raise Disagreement(
            f"save: step is {expected[0]} at rank {first} and {given[0]} at rank {rank} (-1: not given)"
        )
    both = f"save: rank {first} and rank {rank} give"
    shares = "a checkpoint in shares holds what is the same at all ranks; use own= for what each rank has"
    if expected[1] != given[1]:
        raise Disagreement(f"{both} tensors of different names, shapes or types: {shares} for itself")
    if expected[2] != given[2]:
        raise Disagreement(
            f"{both} different numbers or texts beside the tensors: {shares} for itself, such as the state "
            "of its random numbers"
        )
    if expected[3] != given[3]:
        raise Disagreement(f"save: of rank {first} and rank {rank} only one gives own=")

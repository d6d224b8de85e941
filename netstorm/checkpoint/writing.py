"""One rank writes its share of a checkpoint; the first waits for all shares, and writes the manifest.

The ranks meet in the folder alone: by then the training goes on, and its calls must not mix with these.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from netstorm import clock
from netstorm.checkpoint.checksums import Bytes, checksum
from netstorm.checkpoint.folder import (
    complete_by_step,
    explained_errors,
    make_folder,
    remove_checkpoint,
    sync_folder,
    write_whole,
)
from netstorm.checkpoint.manifest import (
    FORMAT,
    File,
    Manifest,
    Shard,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from netstorm.checkpoint.names import (
    MANIFEST,
    failed_file,
    folder_of_step,
    own_file,
    part_file,
    shard_file,
    superfluous,
    values_file,
)
from netstorm.errors import CheckpointError, NetStormError, WaitTimeout

__all__ = ["Outline", "ShareWriter"]

_log = logging.getLogger(__name__)

_FIRST_CHECK_S: Final = 0.01
_LONGEST_CHECK_S: Final = 0.5
"""Between two looks at the folder: the time doubles, as others' shares take milliseconds or minutes."""
_LEFT_S: Final = 10.0
"""How long to wait for a rank that has left the job: its thread may still write, if its process lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What all ranks know of a checkpoint alike."""

    framework: str
    job: str
    step: int
    token: str
    world_size: int
    ranks: tuple[int, ...]
    """Those that write a share, ascending: all, or one. The first of them completes the checkpoint."""
    rounds: dict[str, int]
    tree: bytes
    tensors: tuple[TensorEntry, ...]
    total: int

    @property
    def writers(self) -> int:
        """How many ranks write a share."""
        return len(self.ranks)


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has written."""

    shard: Shard
    own: File | None


class ShareWriter:
    """Writes one rank's share. For a thread of its own."""

    def __init__(
        self,
        base: Path,
        outline: Outline,
        *,
        place: int,
        begin: int,
        share: Bytes,
        own: bytes | None,
        keep: int | None,
        timeout_s: float,
        is_leaving: Callable[[], bool],
        has_left: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Prepare it; nothing is written yet.

        Args:
            base: folder of the job's checkpoints.
            outline: of the checkpoint.
            place: of this process among the outline's ranks.
            begin: first byte of the share.
            share: its bytes.
            own: what this rank keeps for itself.
            keep: number of complete checkpoints to keep; None: all.
            timeout_s: longest wait for the other ranks.
            is_leaving: whether the program is over; ranks but the first then wait for nobody.
            has_left: whether the process that was a rank at the beginning has left the job; any thread may
                ask.
        """
        self._base: Final = base
        self._outline: Final = outline
        self._place: Final = place
        self._begin: Final = begin
        self._share: Final = share
        self._own: Final = own
        self._keep: Final = keep
        self._timeout_s: Final = timeout_s
        self._is_leaving: Final = is_leaving
        self._has_left: Final = has_left
        self._folder: Final = base / folder_of_step(outline.step)

    def run(self) -> Path:
        """Write, wait, and return the checkpoint's folder once the checkpoint is complete.

        Raises:
            CheckpointError: a file cannot be written, here or at another rank.
            WaitTimeout: names the ranks whose shares are missing.
        """
        try:
            with explained_errors(self._folder):
                make_folder(self._base)
                if self._place == 0:
                    self._check_job()
                make_folder(self._folder)
            self._write_share()
            if self._place == 0:
                self._complete(self._wait_for_parts())
            else:
                self._wait_for_manifest()
        except NetStormError as error:
            self._tell_others(error)
            raise
        return self._folder

    # -------------------------------------------------------------------------------------------- every rank

    def _write_share(self) -> None:
        outline, place = self._outline, self._place
        name = shard_file(place, outline.writers, outline.token)
        write_whole(self._folder / name, self._share)
        shard = Shard(
            file=name,
            bytes=len(self._share),
            crc32c=checksum(self._share),
            rank=outline.ranks[place],
            begin=self._begin,
        )
        own = None
        if self._own is not None:
            own = self._write(own_file(place, outline.writers, outline.token), self._own)
        sync_folder(self._folder)
        part = msgspec.json.encode(_Part(shard=shard, own=own))
        write_whole(self._folder / part_file(place, outline.writers, outline.token), part)

    def _write(self, name: str, data: bytes) -> File:
        write_whole(self._folder / name, data)
        return File(file=name, bytes=len(data), crc32c=checksum(data))

    def _wait_for_manifest(self) -> None:
        """Wait until the first rank has completed the checkpoint."""
        path = self._folder / MANIFEST
        seen: tuple[int, int] | None = None  # of the same step there may be one of another attempt

        def is_complete() -> bool:
            nonlocal seen
            try:
                state = path.stat()
            except FileNotFoundError:
                return False
            now = (state.st_mtime_ns, state.st_ino)
            if now == seen:
                return False
            seen = now
            return decode_manifest(path.read_bytes(), str(path)).token == self._outline.token

        if not self._wait(lambda: is_complete() or self._is_leaving(), lambda: (0,)):
            raise WaitTimeout(
                f"{self._folder} has no manifest after {self._timeout_s:g} s: rank "
                f"{self._outline.ranks[0]} writes it when all shares are there; its own error says what it "
                "waits for"
            )

    def _wait(self, condition: Callable[[], bool], places: Callable[[], Iterable[int]]) -> bool:
        """Return whether a condition has come true in time.

        Args:
            condition: looks at the folder.
            places: those that are waited for.

        Raises:
            CheckpointError: one of them has reported an error, or has left the job.
        """
        left_at: dict[int, float] = {}
        deadline = clock.monotonic() + self._timeout_s
        delay = _FIRST_CHECK_S
        while True:
            with explained_errors(self._folder):
                if condition():
                    return True
                for place in places():
                    self._check_place(place, left_at)
            left = deadline - clock.monotonic()
            if left <= 0:
                return False
            clock.sleep(min(delay, left))
            delay = min(2 * delay, _LONGEST_CHECK_S)

    def _check_place(self, place: int, left_at: dict[int, float]) -> None:
        """Raise the error that a rank has reported, or one if it left the job some time ago."""
        outline = self._outline
        rank = outline.ranks[place]
        reported = self._folder / failed_file(place, outline.writers, outline.token)
        if place != self._place and reported.exists():
            raise CheckpointError(f"{self._folder} is not complete: rank {rank} says: {reported.read_text()}")
        now = clock.monotonic()
        if self._has_left(rank) and now - left_at.setdefault(place, now) > _LEFT_S:
            raise CheckpointError(f"{self._folder} is not complete: rank {rank} has left the job")

    def _tell_others(self, error: NetStormError) -> None:
        """Leave the reason in the folder, so that nobody waits in vain; a full disk may prevent it."""
        name = failed_file(self._place, self._outline.writers, self._outline.token)
        with contextlib.suppress(NetStormError):
            write_whole(self._folder / name, str(error).encode())

    # ----------------------------------------------------------------------------------------- the first rank

    def _check_job(self) -> None:
        """Refuse a folder that another job uses: each would remove what the other has written."""
        steps = complete_by_step(self._base)
        newest = max((step for step, complete in steps.items() if complete), default=None)
        if newest is None:
            return
        path = self._base / folder_of_step(newest) / MANIFEST
        job = decode_manifest(path.read_bytes(), str(path)).job
        if job != self._outline.job:
            raise CheckpointError(
                f"{self._base} has checkpoints of the job {job!r}, and this is job {self._outline.job!r}: "
                "give each job a folder of its own, or set NETSTORM_JOB to go on with that job"
            )

    def _wait_for_parts(self) -> list[_Part]:
        outline = self._outline
        missing = {
            place: self._folder / part_file(place, outline.writers, outline.token)
            for place in range(outline.writers)
        }
        parts: dict[int, _Part] = {}

        def are_there() -> bool:
            for place, path in list(missing.items()):
                if path.exists():
                    parts[place] = msgspec.json.decode(path.read_bytes(), type=_Part)
                    del missing[place]
            return not missing

        if not self._wait(are_there, lambda: list(missing)):
            ranks = ", ".join(str(outline.ranks[place]) for place in sorted(missing))
            raise WaitTimeout(
                f"{self._folder} is not complete after {self._timeout_s:g} s: no share of rank {ranks}. Has "
                "it ended? Is the folder on a file system that all ranks share? If not, use shares=False: "
                "rank 0 then writes everything"
            )
        return [parts[place] for place in range(outline.writers)]

    def _complete(self, parts: list[_Part]) -> None:
        outline = self._outline
        own = [part.own for part in parts if part.own is not None]
        manifest = Manifest(
            format=FORMAT,
            framework=outline.framework,
            job=outline.job,
            step=outline.step,
            token=outline.token,
            world_size=outline.world_size,
            written_at=clock.wall(),
            total=outline.total,
            rounds=outline.rounds,
            values=self._write(values_file(outline.token), outline.tree),
            shards=tuple(part.shard for part in parts),
            own=tuple(own) if len(own) == outline.writers else (),
            tensors=outline.tensors,
        )
        sync_folder(self._folder)
        write_whole(self._folder / MANIFEST, encode_manifest(manifest))
        sync_folder(self._folder)
        sync_folder(self._base)
        try:
            self._tidy(manifest)
        except CheckpointError as error:
            _log.warning("%s is complete, but what is no longer needed stays: %s", self._folder, error)

    def _tidy(self, manifest: Manifest) -> None:
        """Remove what this checkpoint does not need, and the checkpoints that are not to be kept."""
        needed = {MANIFEST, *(file.file for file in manifest.files())}
        with explained_errors(self._folder):
            for path in self._folder.iterdir():
                if path.name not in needed:
                    path.unlink(missing_ok=True)
        for step in superfluous(complete_by_step(self._base), self._keep):
            remove_checkpoint(self._base / folder_of_step(step))

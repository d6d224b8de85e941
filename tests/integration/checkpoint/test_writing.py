"""Ranks write their shares of a checkpoint to a real folder, and something goes wrong."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from netstorm.checkpoint import writing
from netstorm.checkpoint.folder import claim_step, complete_by_step
from netstorm.checkpoint.layout import Layout
from netstorm.checkpoint.manifest import TensorEntry
from netstorm.checkpoint.names import MANIFEST, folder_of_step
from netstorm.checkpoint.reading import find_checkpoint, latest_step, read_checkpoint
from netstorm.checkpoint.writing import Outline, ShareWriter
from netstorm.errors import CheckpointError, NetStormError, WaitTimeout

PATIENCE_S = 30.0
TREE = b"\x80"


def write(
    base: Path,
    step: int,
    *,
    ranks: int = 3,
    who: tuple[int, ...] | None = None,
    size: int = 300,
    token: str = "0123456789ab",
    job: str = "default",
    keep: int | None = None,
    timeout_s: float = PATIENCE_S,
    is_leaving: bool = False,
    own: bool = True,
    names: tuple[int, ...] | None = None,
    gone: tuple[int, ...] = (),
) -> list[Path | NetStormError]:
    """Have ranks write a checkpoint of one tensor, whose bytes count up; return what became of each."""
    values = np.arange(size, dtype=np.uint8).tobytes()
    layout = Layout.of([size], ranks)
    padded = values + bytes(layout.total - size)
    outline = Outline(
        framework="PyTorch",
        job=job,
        step=step,
        token=token,
        world_size=ranks,
        ranks=names or tuple(range(ranks)),
        rounds={},
        tree=TREE,
        tensors=(TensorEntry(name="w", dtype="uint8", shape=(size,), kind="torch", offset=0, bytes=size),),
        total=layout.total,
    )

    def one(rank: int) -> Path | NetStormError:
        writer = ShareWriter(
            base,
            outline,
            place=rank,
            begin=layout.cuts[rank],
            share=padded[layout.cuts[rank] : layout.cuts[rank + 1]],
            own=bytes([rank]) if own else None,
            keep=keep,
            timeout_s=timeout_s,
            is_leaving=lambda: is_leaving,
            has_left=lambda rank: rank in gone,
        )
        try:
            return writer.run()
        except NetStormError as error:
            return error

    chosen = range(ranks) if who is None else who
    with concurrent.futures.ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, chosen))


def read(base: Path) -> bytes:
    found = find_checkpoint(base)
    assert found is not None
    return bytes(read_checkpoint(found).tensor(0))


def test_three_ranks_write_one_checkpoint_and_anyone_reads_it(tmp_path: Path):
    base = tmp_path / "checkpoints"
    assert write(base, 7) == [base / "step-000007"] * 3
    assert latest_step(base) == 7
    found = find_checkpoint(base)
    assert found is not None
    contents = read_checkpoint(found)
    assert bytes(contents.tensor(0)) == np.arange(300, dtype=np.uint8).tobytes()
    assert contents.own == (b"\0", b"\1", b"\2")
    assert contents.tree == TREE
    names = {path.name for path in (base / "step-000007").iterdir()}
    assert names == {MANIFEST, *(file.file for file in contents.manifest.files())}


def test_a_change_of_any_byte_is_found_and_the_file_named(tmp_path: Path):
    write(tmp_path, 0, ranks=2, size=70)
    for path in (tmp_path / "step-000000").iterdir():
        if path.name == MANIFEST:  # see the manifest's own tests
            continue
        intact = path.read_bytes()
        for place in range(len(intact)):
            damaged = bytearray(intact)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                read(tmp_path)
        path.write_bytes(intact[:-1])
        with pytest.raises(CheckpointError, match=path.name):
            read(tmp_path)
        path.write_bytes(intact)
    assert len(read(tmp_path)) == 70


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    write(tmp_path, 0)
    next((tmp_path / "step-000000").glob("shard-00001*")).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001.*is missing.*remove .*step-000000"):
        read(tmp_path)


def test_a_rank_that_does_not_come_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, caplog):
    write(tmp_path, 1)
    write(tmp_path, 2, who=(1,), is_leaving=True)
    (outcome,) = write(tmp_path, 2, who=(0,), timeout_s=0.1)
    assert isinstance(outcome, WaitTimeout)
    assert "no share of rank 2." in str(outcome)
    (outcome,) = write(tmp_path, 2, who=(1,))
    assert "rank 0 says: " in str(outcome)
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.manifest.step == 1
    assert "step-000002 is skipped: it was only written in part" in caplog.text
    with pytest.raises(CheckpointError, match="was only written in part; complete ones are of steps: 1"):
        find_checkpoint(tmp_path, 2)


def test_in_an_elastic_job_the_ranks_that_are_there_write_and_are_named(tmp_path: Path):
    assert write(tmp_path, 1, ranks=2, names=(1, 3)) == [tmp_path / "step-000001"] * 2
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert [shard.rank for shard in found.manifest.shards] == [1, 3]
    assert len(read(tmp_path)) == 300
    (outcome,) = write(tmp_path, 2, ranks=2, names=(1, 3), who=(0,), timeout_s=0.1)
    assert "no share of rank 3." in str(outcome)
    (outcome,) = write(tmp_path, 2, ranks=2, names=(1, 3), who=(1,))
    assert "rank 1 says: " in str(outcome)


def test_a_rank_that_has_left_the_job_is_not_waited_for_to_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writing, "_LEFT_S", 0.05)
    write(tmp_path, 1, who=(2,), is_leaving=True)  # has left too, but its share is there
    (outcome,) = write(tmp_path, 1, who=(0,), gone=(1, 2))
    assert "is not complete: rank 1 has left the job" in str(outcome)


def test_a_half_written_attempt_of_the_same_step_does_no_harm(tmp_path: Path):
    write(tmp_path, 5, who=(1, 2), size=999, token="aaaaaaaaaaaa", timeout_s=0.1)
    assert write(tmp_path, 5, token="bbbbbbbbbbbb") == [tmp_path / "step-000005"] * 3
    assert len(read(tmp_path)) == 300
    assert not list((tmp_path / "step-000005").glob("*aaaaaaaaaaaa*"))


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path):
    write(tmp_path, 5, token="aaaaaaaaaaaa", size=100)
    assert write(tmp_path, 5, token="bbbbbbbbbbbb", size=200) == [tmp_path / "step-000005"] * 3
    assert len(read(tmp_path)) == 200


def test_a_rank_that_cannot_write_tells_all_others_why(tmp_path: Path):
    folder = tmp_path / "step-000003"
    folder.mkdir()
    blocked = folder / "shard-00001-of-00003-0123456789ab.bin"
    (blocked / "in the way").mkdir(parents=True)
    outcomes = write(tmp_path, 3)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), outcomes
    assert "rank 1 says" in str(outcomes[0])
    assert blocked.name in str(outcomes[1])
    assert complete_by_step(tmp_path) == {3: False}


def test_old_checkpoints_go_once_the_new_one_is_complete(tmp_path: Path):
    for step in range(4):
        write(tmp_path, step, ranks=1, keep=2)
    assert complete_by_step(tmp_path) == {2: True, 3: True}


def test_another_jobs_folder_is_refused(tmp_path: Path):
    write(tmp_path, 0, ranks=1, job="one")
    (outcome,) = write(tmp_path, 1, ranks=1, job="two")
    assert "has checkpoints of the job 'one', and this is job 'two'" in str(outcome)


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    (outcome,) = write(tmp_path, 0, ranks=1)
    assert isinstance(outcome, CheckpointError)
    assert "shard-00000" in str(outcome)
    assert "No space left on device; free some space, or keep fewer checkpoints (keep=N)" in str(outcome)
    assert not list((tmp_path / "step-000000").glob("*.tmp"))


def test_a_path_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (outcome,) = write(tmp_path / "file", 0, ranks=1)
    assert f"checkpoint {tmp_path / 'file'}" in str(outcome)
    assert "give the path of a folder" in str(outcome)


def test_a_rank_whose_program_is_over_does_not_wait_for_the_manifest(tmp_path: Path):
    assert write(tmp_path, 0, who=(2,), is_leaving=True) == [tmp_path / "step-000000"]
    assert threading.active_count() == 1


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert find_checkpoint(tmp_path) is None
    assert latest_step(tmp_path / "missing") is None


def test_two_processes_that_save_by_themselves_never_get_the_same_step(tmp_path):
    base = tmp_path / "new" / "checkpoints"
    assert claim_step(base, None) == 0
    assert claim_step(base, 7) == 7
    assert claim_step(base, 3) == 8
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        steps = list(threads.map(lambda _: claim_step(base, None), range(40)))
    assert sorted(steps) == list(range(9, 49))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="give the path of a folder"):
        claim_step(tmp_path / "file", None)


def test_only_their_user_can_read_the_files_of_a_checkpoint_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        base = tmp_path / "checkpoints"
        step = claim_step(base, None)
        name = folder_of_step(step)
        (base / name / (MANIFEST + ".tmp")).write_bytes(b"of an attempt before, for everybody")
        write(base, step)
    finally:
        os.umask(before)
    files = [path for path in base.rglob("*") if path.is_file()]
    assert len(files) >= 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (base, base / name)} == {0o700}

"""Ranks write their shares of a checkpoint to a real folder, and something goes wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from netstorm.checkpoint import files
from netstorm.checkpoint.files import (
    ShareWriter,
    claim_step,
    complete_by_step,
    find_checkpoint,
    latest_step,
    read_files,
)
from netstorm.checkpoint.format import (
    INDEX,
    Index,
    NumpyTensors,
    Size,
    decode_files,
    encode_tensors,
    folder_of_step,
    numbered_file,
    restore,
    take_apart,
)
from netstorm.errors import CheckpointError, NetStormError, WaitTimeout

PATIENCE_S = 30.0
TENSORS = NumpyTensors()


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
    tree, tensors, described = take_apart({"w": np.arange(size, dtype=np.uint8)}, TENSORS)
    index = Index(
        metadata=Size(size),
        weight_map={"w": numbered_file("model.safetensors", ranks - 1, ranks, token)},
        framework="PyTorch",
        job=job,
        step=step,
        token=token,
        world_size=ranks,
        written_at=0,
        rounds={},
        files=(),
        state=tree,
        own=(),
    )

    def one(rank: int) -> Path | NetStormError:
        own_tree, own_tensors, shared = take_apart(
            {"rank": rank, "seed": np.ones(rank)}, TENSORS, prefix=f"own.{rank}."
        )
        all_tensors = {**tensors, **own_tensors}
        if rank == ranks - 1:
            shared |= described
        writer = ShareWriter(
            base=base,
            index=index,
            ranks=names or tuple(range(ranks)),
            place=rank,
            share=encode_tensors(shared, lambda name: TENSORS.data(all_tensors[name])),
            own=own_tree if own else None,
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
    state = restore(found.index.state, decode_files(read_files(found)), TENSORS)
    assert isinstance(state, dict)
    values: bytes = state["w"].tobytes()
    assert values == np.arange(len(values), dtype=np.uint8).tobytes()
    return values


def test_three_ranks_write_one_checkpoint_and_anyone_reads_it(tmp_path: Path):
    base = tmp_path / "checkpoints"
    assert write(base, 7) == [base / "step-000007"] * 3
    assert latest_step(base) == 7
    found = find_checkpoint(base)
    assert found is not None
    assert len(read(base)) == 300
    own = [restore(tree, decode_files(read_files(found)), TENSORS) for tree in found.index.own]
    np.testing.assert_equal(own, [{"rank": rank, "seed": np.ones(rank)} for rank in range(3)])
    names = {path.name for path in (base / "step-000007").iterdir()}
    assert names == {INDEX, *(file.file for file in found.index.files)}
    by_others = {
        name: array
        for file in sorted(set(found.index.weight_map.values()))
        for name, array in safetensors.numpy.load_file(base / "step-000007" / file).items()
    }
    assert by_others.keys() == found.index.weight_map.keys()
    assert by_others["w"].tobytes() == read(base)


def test_a_change_of_any_byte_is_found_and_the_file_named(tmp_path: Path):
    write(tmp_path, 0, ranks=2, size=70)
    for path in (tmp_path / "step-000000").iterdir():
        if path.name == INDEX:  # see the index's own tests
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
    next((tmp_path / "step-000000").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.*is missing.*remove .*step-000000"):
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
    assert found.index.step == 1
    assert "step-000002 is skipped: it was only written in part" in caplog.text
    with pytest.raises(CheckpointError, match="was only written in part; complete ones are of steps: 1"):
        find_checkpoint(tmp_path, 2)


def test_in_an_elastic_job_the_ranks_that_are_there_write_and_are_named(tmp_path: Path):
    assert write(tmp_path, 1, ranks=2, names=(1, 3)) == [tmp_path / "step-000001"] * 2
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert [file.rank for file in found.index.files] == [1, 3]
    assert len(read(tmp_path)) == 300
    (outcome,) = write(tmp_path, 2, ranks=2, names=(1, 3), who=(0,), timeout_s=0.1)
    assert "no share of rank 3." in str(outcome)
    (outcome,) = write(tmp_path, 2, ranks=2, names=(1, 3), who=(1,))
    assert "rank 1 says: " in str(outcome)


def test_a_rank_that_has_left_the_job_is_not_waited_for_to_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "_LEFT_S", 0.05)
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
    blocked = folder / "model-00002-of-00003-0123456789ab.safetensors"
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
    assert "model-00001" in str(outcome)
    assert "No space left on device; free some space, or keep fewer checkpoints (keep=N)" in str(outcome)
    assert not list((tmp_path / "step-000000").glob("*.tmp"))


def test_a_path_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (outcome,) = write(tmp_path / "file", 0, ranks=1)
    assert f"checkpoint {tmp_path / 'file'}" in str(outcome)
    assert "give the path of a folder" in str(outcome)


def test_a_rank_whose_program_is_over_does_not_wait_for_the_index(tmp_path: Path):
    before = threading.active_count()
    assert write(tmp_path, 0, who=(2,), is_leaving=True) == [tmp_path / "step-000000"]
    assert threading.active_count() == before


class Crash(BaseException):
    """Nothing is done from here on."""


@pytest.mark.parametrize("step", [1, 2])
def test_a_crash_at_any_instant_leaves_a_whole_checkpoint_the_former_or_the_new_one(
    tmp_path: Path, monkeypatch, step: int
):
    """What calls of the system have done until then stays. The new checkpoint may be of the same step."""
    calls = ("open", "fsync", "replace", "unlink", "rmdir", "mkdir")
    left = 0

    def crashing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return real(*arguments, **named)

        return call

    lengths = []
    for count in itertools.count():
        base = tmp_path / str(count)
        write(base, 1, ranks=1, size=100, token="aaaaaaaaaaaa")
        left = count
        with monkeypatch.context() as patched:
            for name in calls:
                patched.setattr(os, name, crashing(getattr(os, name)))
            with contextlib.suppress(Crash):
                write(base, step, ranks=1, size=200, token="bbbbbbbbbbbb", keep=1)
        lengths.append(len(read(base)))
        write(base, step, ranks=1, size=300, token="cccccccccccc", keep=1)
        assert len(read(base)) == 300
        assert complete_by_step(base) == {step: True}
        assert len(list(base.rglob("*"))) == 3
        if left > 0:
            break
    assert len(lengths) > 15
    assert sorted(lengths) == lengths
    assert set(lengths) == {100, 200}


def test_a_folder_of_the_former_format_is_neither_used_nor_tidied(tmp_path: Path):
    former = tmp_path / "step-000001"
    former.mkdir()
    (former / "manifest.json").write_text("{}")
    for act in (lambda: find_checkpoint(tmp_path), lambda: claim_step(tmp_path, None)):
        with pytest.raises(
            CheckpointError, match=r"step-000001 has the format .* `netstorm checkpoint convert"
        ):
            act()
    (outcome,) = write(tmp_path, 2, ranks=1)
    assert "netstorm checkpoint convert" in str(outcome)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


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
        (base / name / (INDEX + ".tmp")).write_bytes(b"of an attempt before, for everybody")
        write(base, step)
    finally:
        os.umask(before)
    written = [path for path in base.rglob("*") if path.is_file()]
    assert len(written) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (base, base / name)} == {0o700}

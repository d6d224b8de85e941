"""The scheduler's log: what is read is what was written, also if its end is torn; nothing else is a log."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler.process.state_file import StateFile, boot_identity
from netstorm.scheduler.replay_log import records as r
from netstorm.scheduler.replay_log.leases import LEASE, Leases
from netstorm.scheduler.replay_log.replay import ReplayedJob
from tests.unit.scheduler.driving import star

MEMBERS = tuple(Member(rank, "10.0.0.1", 4000 + rank, "denver", 77 + rank) for rank in range(3))


def began(**changed):
    fields = {
        "job": "alexnet",
        "release": "1",
        "boot": boot_identity(),
        "chunks": (4, 8, 16),
        "members": MEMBERS,
        "policy": star(3),
    }
    return r.Began(**{**fields, **changed})


STORY = [
    began(),
    r.KeyAdded(rank=1, spec=KeySpec(0, "w", (4,), "float32"), version=1),
    r.KeyAdded(rank=0, spec=KeySpec(0, "b", (), "float32"), version=1),
    r.Leased(rounds=((0, 17), (1, 17))),
    r.Installed(policy=star(3, version=2), starts=((0, 5), (1, 3))),
    r.Leased(rounds=((0, 33),)),
    r.BarrierArrival(rank=2, number=0),
    r.Finished(rank=2, last_rounds={0: 4}),
]


def test_a_job_is_as_its_log_says():
    data = r.MAGIC + r.encode(STORY)
    records, size = r.read(data, "log")
    assert records == STORY
    assert size == len(data)
    job = ReplayedJob.replay(records, "log")
    assert job is not None
    assert job.members == MEMBERS
    assert job.version == 2
    assert [spec.name for _, spec in job.keys] == ["w", "b"]
    assert job.rows == [[(0, 1), (5, 2)], [(0, 1), (3, 2)]]
    assert job.granted == [33, 17]
    assert job.barriers == [0, 0, 1]
    assert job.finished == {2: {0: 4}}


@given(st.integers(0, 10_000))
def test_whatever_is_missing_at_the_end_only_the_last_record_is_lost(cut):
    parts = [r.MAGIC, *(r.encode([record]) for record in STORY)]
    data = b"".join(parts)
    cut %= len(data) + 1
    records, size = r.read(data[:cut], "log")
    whole = [at for at in range(len(parts) + 1) if len(b"".join(parts[:at])) <= cut][-1]
    assert records == STORY[: max(0, whole - 1)]
    assert size == len(b"".join(parts[:whole]))


def test_an_end_that_was_never_written_is_no_record():
    data = r.MAGIC + r.encode(STORY)
    assert r.read(data + bytes(1000), "log") == (STORY, len(data))


@given(st.integers(0, 2**32))
def test_a_bit_that_changed_is_an_error_or_a_torn_end_and_never_another_story(seed):
    chance = random.Random(seed)
    data = bytearray(r.MAGIC + r.encode(STORY))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        records, _ = r.read(bytes(data), "log")
    except UsageError as error:
        assert "log" in str(error)
    else:
        assert records == STORY[: len(records)]
        assert len(records) < len(STORY)


@pytest.mark.parametrize("data", [b"something else", b"NSSTATE\x02" + bytes(8)])
def test_what_is_no_log_of_this_version_is_an_error_that_says_so(data):
    with pytest.raises(UsageError, match=r"state\.log is (not a scheduler's log|written by another version)"):
        r.read(data, "state.log")


def test_a_story_without_a_beginning_is_an_error():
    with pytest.raises(UsageError, match="in the middle of a job"):
        ReplayedJob.replay(STORY[1:], "log")


def test_a_job_that_is_over_is_no_past():
    assert ReplayedJob.replay([*STORY, r.Ended(text="well")], "log") is None


def test_grants_are_written_down_ahead_and_only_once():
    leases = Leases()
    assert leases.extend([(0, 1), (1, 1)]) == r.Leased(rounds=((0, 1 + LEASE), (1, 1 + LEASE)))
    for round in range(2, 2 + LEASE):
        assert leases.extend([(0, round)]) is None
    assert leases.extend([(0, 2 + LEASE)]) == r.Leased(rounds=((0, 2 + 2 * LEASE),))


def test_a_file_is_gone_on_with_behind_its_last_whole_record(tmp_path):
    file = StateFile(tmp_path / "new" / "folder", "job/1")
    assert file.replayed is None
    file.write(STORY)
    file.close()
    with file.path.open("ab") as torn:
        torn.write(b"\x50\0\0\0half a rec")
    again = StateFile(tmp_path / "new" / "folder", "job/1")
    assert again.replayed is not None
    again.write([r.BarrierArrival(rank=0, number=0)])
    again.close()
    third = StateFile(tmp_path / "new" / "folder", "job/1")
    assert third.replayed is not None
    assert third.replayed.barriers == [1, 0, 1]
    third.write([r.Ended(text="well")])
    third.close()
    fourth = StateFile(tmp_path / "new" / "folder", "job/1")
    assert fourth.replayed is None
    assert fourth.path.read_bytes() == r.MAGIC
    fourth.close()


def test_two_schedulers_cannot_write_one_log(tmp_path):
    file = StateFile(tmp_path, "job")
    with pytest.raises(UsageError, match="in use by another scheduler"):
        StateFile(tmp_path, "job")
    file.close()
    StateFile(tmp_path, "job").close()


def test_a_log_from_before_the_machine_went_down_is_refused(tmp_path):
    file = StateFile(tmp_path, "job")
    file.write([began(boot="another run")])
    file.close()
    with pytest.raises(UsageError, match="before this machine was last started"):
        StateFile(tmp_path, "job")


def test_a_folder_that_is_none_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="NETSTORM_STATE_DIR="):
        StateFile(tmp_path / "file", "job")

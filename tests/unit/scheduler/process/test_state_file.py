"""The file of a replay log: appending, locking, and what is refused."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.scheduler.process.state_file import StateFile
from netstorm.scheduler.replay_log import records as r
from tests.unit.scheduler.replay_log.sample_log import RECORDS, began


def test_a_file_is_gone_on_with_behind_its_last_whole_record(tmp_path):
    file = StateFile(tmp_path / "new" / "folder", "job/1")
    assert file.replayed is None
    file.write(RECORDS)
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

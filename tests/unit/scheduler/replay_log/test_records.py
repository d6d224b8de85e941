"""What is read from a replay log is what was written, also if its end is cut off; nothing else is a log."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.scheduler import replay_log as r
from tests.unit.scheduler.replay_log.sample_log import RECORDS


@given(st.integers(0, 10_000))
def test_whatever_is_missing_at_the_end_only_the_last_record_is_lost(cut):
    parts = [r.MAGIC, *(r.encode([record]) for record in RECORDS)]
    data = b"".join(parts)
    cut %= len(data) + 1
    records, size = r.read(data[:cut], "log")
    whole = [at for at in range(len(parts) + 1) if len(b"".join(parts[:at])) <= cut][-1]
    assert records == RECORDS[: max(0, whole - 1)]
    assert size == len(b"".join(parts[:whole]))


def test_an_end_that_was_never_written_is_no_record():
    data = r.MAGIC + r.encode(RECORDS)
    assert r.read(data + bytes(1000), "log") == (RECORDS, len(data))


@given(st.integers(0, 2**32))
def test_a_bit_that_changed_is_an_error_or_a_torn_end_and_never_another_job(seed):
    chance = random.Random(seed)
    data = bytearray(r.MAGIC + r.encode(RECORDS))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        records, _ = r.read(bytes(data), "log")
    except UsageError as error:
        assert "log" in str(error)
    else:
        assert records == RECORDS[: len(records)]
        assert len(records) < len(RECORDS)


@pytest.mark.parametrize("data", [b"something else", b"NSSTATE\x02" + bytes(8)])
def test_what_is_no_log_of_this_version_is_an_error_that_says_so(data):
    with pytest.raises(UsageError, match=r"state\.log is (not a scheduler's log|written by another version)"):
        r.read(data, "state.log")

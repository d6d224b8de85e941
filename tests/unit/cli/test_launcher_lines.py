from __future__ import annotations

import pytest

from netstorm.cli.support import BEGUN, first_failure, first_failure_line


@pytest.mark.parametrize("rank", [-1, 0, 4711])
def test_the_launcher_reads_what_the_scheduler_writes(rank):
    text = "job 'default' has failed: rank 2 (10.0.0.7:4242) failed: ValueError: ü"
    assert first_failure(first_failure_line(rank, text).encode()) == (rank, text)


@pytest.mark.parametrize(
    "line", ["", "netstorm-verdict", "netstorm-verdict one x", " netstorm-verdict 1 x", BEGUN]
)
def test_other_output_is_no_such_line(line):
    assert first_failure(line.encode()) is None

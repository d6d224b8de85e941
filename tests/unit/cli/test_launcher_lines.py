from __future__ import annotations

import pytest

from netstorm.cli.launcher_lines import first_failed_rank, first_failure_line


@pytest.mark.parametrize("rank", [-1, 0, 12])
def test_the_launcher_reads_what_the_scheduler_writes(rank):
    assert first_failed_rank(first_failure_line(rank).encode()) == rank


@pytest.mark.parametrize(
    "line", [b"", b"netstorm-verdict", b"netstorm-verdict 1 or so", b"\xff netstorm-verdict 1"]
)
def test_other_lines_name_no_rank(line):
    assert first_failed_rank(line) is None

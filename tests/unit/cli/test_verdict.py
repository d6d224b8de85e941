from __future__ import annotations

import pytest

from netstorm.cli.verdict import blamed_rank, verdict_line


@pytest.mark.parametrize("rank", [-1, 0, 12])
def test_the_launcher_reads_what_the_scheduler_writes(rank):
    assert blamed_rank(verdict_line(rank).encode()) == rank


@pytest.mark.parametrize(
    "line", [b"", b"netstorm-verdict", b"netstorm-verdict 1 or so", b"\xff netstorm-verdict 1"]
)
def test_other_lines_are_no_verdict(line):
    assert blamed_rank(line) is None

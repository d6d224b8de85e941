"""A job whose every address is of IPv6."""

from __future__ import annotations

import re

import pytest

from netstorm.pslite.host_addresses import source_towards
from tests.integration.failures.scripts import PLAIN_JOIN, PLAIN_PROLOGUE
from tests.integration.jobs import Job, run_netstorm

pytestmark = pytest.mark.skipif(source_towards("::1") is None, reason="this machine has no IPv6")

SCRIPT = f"""{PLAIN_PROLOGUE}{PLAIN_JOIN}
show("sum", out[0], runtime.node.options.host)
while not os.path.exists(sys.argv[0] + ".end"):
    time.sleep(0.05)
show("clock", runtime.statistics()["clock_error_s"] < 5)
"""


def test_a_job_sums_tells_the_time_and_is_watched_over_ipv6(tmp_path):
    with Job(tmp_path, 2, DMLC_PS_ROOT_URI="[::1]", NETSTORM_HTTP_BIND="::1", NETSTORM_CLOCK="trees") as job:
        assert job.address.startswith("[::1]:")
        for rank in range(2):
            job.start(rank, SCRIPT)
        for rank in range(2):
            job.wait_until_said(rank, "sum 2.0 ::1")
        watch = re.search(r"netstorm (top --scheduler \S+)", job.said(-1))
        assert watch is not None
        assert "[::1]:" in watch[1]
        shown = run_netstorm(tmp_path, *watch[1].split(), "--once")
        assert shown.code == 0, shown.err
        assert "[::1]:" in shown.out
        for rank in range(2):
            (tmp_path / f"script{rank}.py.end").touch()
        for end in job.end_all():
            assert end.code == 0, end.text
            assert "clock True" in end.text
        assert job.end(-1).code == 0

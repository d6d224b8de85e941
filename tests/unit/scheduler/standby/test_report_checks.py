"""A node's report of its job: its parts fit together, and it is the node's own."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import JobReport, KeyGrant, KeySpec, Member, Resume
from netstorm.scheduler.standby import check_report
from tests.unit.scheduler.driving import star

MEMBERS = (Member(0, "a", 4000, "", 10), Member(1, "b", 4000, "", 11), Member(2, "", 0, "", 0))
REPORT = JobReport(
    members=MEMBERS,
    policy=star(3),
    specs=(KeySpec(0, "w", (4,), "float32"),),
    grants=(KeyGrant(0, "w", 0, 0, 0, 4),),
    granted={0: 3},
    finished={1: {0: 3}},
    barriers=2,
)


def check(incarnation=10, user="", **fields):
    report = msgspec.structs.replace(REPORT, **fields)
    check_report(Resume(keys=(), begun=(), barriers=(), job=report), incarnation, user, 3)


def test_the_report_of_a_correct_node_is_taken():
    check()
    check_report(Resume(keys=(), begun=(), barriers=()), 99, "", 3)


def test_nobody_reports_a_job_that_it_is_not_in():
    with pytest.raises(ProtocolViolation, match="not a member of"):
        check(12)
    with pytest.raises(ProtocolViolation, match="not a member of"):
        check(10, "another key than in its report")


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": MEMBERS[:2]},
        {"members": (MEMBERS[0], MEMBERS[0], MEMBERS[2])},
        {"members": (MEMBERS[0], Member(1, "b", 4000, "", 10), MEMBERS[2])},
        {"policy": star(2)},
        {"barriers": -1},
        {"grants": ()},
        {"grants": (KeyGrant(0, "w", 0, 0, 0, 0),)},
        {"grants": (KeyGrant(0, "v", 0, 0, 0, 4),)},
        {"specs": (KeySpec(0, "w", (4,), "complex64"),)},
        {"specs": (KeySpec(0, "w", (-4,), "float32"),)},
        {"granted": {-1: 3}},
        {"finished": {3: {}}},
        {"grants": (KeyGrant(0, "w", 2**17, 0, 0, 4),)},
        {"policies": (star(2, 4),)},
        {"rows": {0: ((0, 7),)}},
        {"rows": {0: ((-1, 1),)}},
        {"rows": {0: ()}},
    ],
    ids=str,
)
def test_a_report_whose_parts_do_not_fit_together_is_refused(wrong):
    with pytest.raises(ProtocolViolation, match="a node reports a job with"):
        check(**wrong)

"""The records of a job, for tests."""

from __future__ import annotations

from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.process.hosted import boot_identity
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


RECORDS = [
    began(),
    r.KeyAdded(rank=1, spec=KeySpec(0, "w", (4,), "float32"), version=1),
    r.KeyAdded(rank=0, spec=KeySpec(0, "b", (), "float32"), version=1),
    r.Leased(rounds=((0, 17), (1, 17))),
    r.Installed(policy=star(3, version=2), starts=((0, 5), (1, 3))),
    r.Leased(rounds=((0, 33),)),
    r.BarrierArrival(rank=2, number=0),
    r.RankFinished(rank=2, last_rounds={0: 4}),
]

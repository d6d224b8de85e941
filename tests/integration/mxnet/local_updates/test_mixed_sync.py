"""MixedSync with a bound on how far a site may be ahead; its other properties are in `test_stores`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import Job

pytestmark = pytest.mark.slow

BOUNDED = """
import os, sys, time
from pathlib import Path
import numpy as np
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import MixedSync

kv, STEPS, BOUND = MixedSync(), 6, int(os.environ["NETSTORM_STALENESS"])
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("steps", mx.nd.zeros((2, 1000)))  # of both sites; each rank counts for half a step
kv.init("never pushed", mx.nd.zeros((10,)))
mine, is_ahead = kv.rank % 2, Path(sys.argv[0]).with_name("ahead")
gradient, out = np.zeros((2, 1000), "float32"), mx.nd.zeros((2, 1000))
gradient[mine] = -0.5
for step in range(1, STEPS + 1):
    while mine == 1 and not is_ahead.exists():
        time.sleep(0.02)  # until the first site has gone as far as it may
    kv.push("steps", mx.nd.array(gradient))
    if step == 1:
        try:
            kv.push("steps", mx.nd.array(gradient))
        except UsageError as error:
            assert "call clock() after each step" in str(error), error
        else:
            raise AssertionError("not refused")
    kv.clock()
    kv.pull("steps", out=out)
    found = out.asnumpy()
    assert (found[mine] == step).all(), (step, found)
    assert (found[1 - mine] >= step - BOUND).all(), (step, found)
    ahead = step - int(found[1 - mine].min())
    print("ahead by", ahead, flush=True)
    if kv.rank == 0 and ahead == BOUND:
        is_ahead.touch()
"""


def test_a_site_is_ahead_of_the_slowest_by_no_more_than_the_bound(tmp_path: Path) -> None:
    with Job(tmp_path, 4, NETSTORM_STALENESS=2) as job:
        for rank in range(4):
            job.start(rank, BOUNDED, NETSTORM_SITE="ab"[rank % 2])
        ended = job.end_all()
    assert [one.code for one in ended] == [0] * 4, [one.text for one in ended]
    assert "ahead by 2" in ended[0].out


def test_a_bound_of_0_is_refused(tmp_path: Path) -> None:
    script = "from netstorm.frontends.mxnet.local_updates import MixedSync\nMixedSync()\n"
    with Job(tmp_path, 1, NETSTORM_STALENESS=0) as job:
        job.start(0, script)
        refused = job.end(0)
    assert refused.code == 1
    assert "NETSTORM_STALENESS=0, which keeps all ranks in step" in refused.err

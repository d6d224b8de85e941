"""`ElasticSampler` of MXNet in an elastic job: no sample counts twice, whoever dies and joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic.scripts import PROLOGUE, TIMEOUTS, ask_for_the_end, digest_of, kill, start
from tests.integration.jobs import Job

SAMPLES = (
    "import os\nos.environ['NETSTORM_RESCALE'] = '0'  # plain sums\n"
    + PROLOGUE.replace('kv = mx.kv.create("dist_sync_netstorm")\n', "")
    + """
from netstorm.frontends.mxnet.elastic import ElasticSampler
from netstorm.frontends.mxnet.local_updates import LocalSGD

# The value counts how often each sample has counted in a step; averages count it in parts.
kv = eval(os.environ.get("STORE", "mx.kv.create('dist_sync_netstorm')"))
LENGTH, BATCH = 200_000, 10
sampler = ElasticSampler(LENGTH, BATCH, seed=5)
kv.attach_sampler(sampler)
kv.attach_state("place", lambda: place, place.update)
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init(["seen", "end"], [mx.nd.zeros((LENGTH,)), mx.nd.zeros((1,))])
seen_by_all, ended = mx.nd.zeros((LENGTH,)), mx.nd.zeros((1,))
show("begins at step", place["step"], "and sample", sampler.position)
while not (ended.asnumpy()[0] and getattr(kv, "is_averaged", True)):
    mine = np.zeros(LENGTH, np.float32)
    batch = sampler.take()
    mine[batch] -= 1
    time.sleep(0.002 * len(batch))  # what training takes: less on the small batches of who catches up
    kv.push(["seen", "end"], [mx.nd.array(mine), -asks_for_the_end()])
    kv.pull(["seen", "end"], out=[seen_by_all, ended])
    if getattr(kv, "is_averaged", True):
        seen_by_all.wait_to_read()
        stepped("seen")
counts = seen_by_all.asnumpy()
show("twice:", int((counts.round() > 1).sum()))
show("place:", sampler.epoch, sampler.position, sampler.ranks)
assert sampler.epoch == 0 and (counts > 0.1).sum() <= sampler.position
end([seen_by_all])
"""
)


@pytest.mark.parametrize("store", ["mx.kv.create('dist_sync_netstorm')", "LocalSGD(2)"])
def test_no_sample_counts_twice_when_ranks_die_and_join(tmp_path: Path, store: str) -> None:
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:4", STORE=store, CHUNK_SIZE=400_000, **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, SAMPLES)
        job.wait_until_said(1, "ranks (0, 1, 2)")
        kill(job, 0)
        job.wait_until_said(1, "ranks (1, 2)")
        start(job, 0, SAMPLES)
        start(job, 3, SAMPLES)
        job.wait_until_said(1, "ranks (0, 1, 2, 3)")
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in range(4)]
    assert len({digest_of(one) for one in ended}) == 1, [one.text for one in ended]
    assert "begins at step 0 and sample 0" in ended[1].out
    assert "begins at step 0 and sample 0" not in ended[0].out, "it has begun anew"
    places = {line for one in ended for line in one.out.splitlines() if line.startswith("place:")}
    assert len(places) == 1, places
    twice = int(ended[1].out.split("twice: ")[1].split()[0])
    if "LocalSGD" in store:
        return
    # Who comes trains in the first step in which it counts on a batch that another one has, too.
    assert twice <= 2 * 10

"""Training that stops, and goes on with another number of nodes: the states are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Sums and updates of integers: with SGD all numbers are exact.
TRAIN = """
import hashlib, sys
import numpy as np
from netstorm.frontends.mxnet.compat import mx
import netstorm.frontends.mxnet

BEGIN, END, LOAD, SAVE, FOLDER, NAME, DUMP = {options!r}
kv = mx.kv.create("dist_sync_netstorm")
optimizer = mx.optimizer.create(NAME, learning_rate=2.0**-4, rescale_grad=1.0)
if not isinstance(optimizer, mx.optimizer.Adam):
    optimizer.momentum = 0.5
shapes = {{"a": (40, 30), "b": (7,)}}
weights = {{name: mx.nd.ones(shape) for name, shape in shapes.items()}}
if LOAD:
    weights = mx.nd.load(f"{{FOLDER}}/weights")
kv.set_optimizer(optimizer)
for name in shapes:
    kv.init(name, weights[name])
if LOAD:
    kv.load_optimizer_states(f"{{FOLDER}}/states")
for epoch in range(BEGIN, END):
    for sample in range(8):
        if sample % kv.num_workers == 0:
            for name, shape in shapes.items():
                drawn = np.random.RandomState([epoch, sample + kv.rank, len(shape)]).randint(-3, 4, shape)
                kv.push(name, mx.nd.array(drawn))
for name in shapes:
    kv.pull(name, out=weights[name])
kv._barrier()  # all have read
if SAVE and kv.rank == 0:
    kv.save_optimizer_states(f"{{FOLDER}}/states", dump_optimizer=DUMP)
    mx.nd.save(f"{{FOLDER}}/weights", weights)
from netstorm.frontends.mxnet.updates import digest_of
print(digest_of(kv._updater.states), digest_of(weights), kv._updater.optimizer.num_update)
kv._barrier()
"""


def train(folder: Path, nodes: int, *options: object) -> tuple[str, str, str]:
    """Return digests of states and weights, the same on all nodes, and the number of updates."""
    (folder / "ready").unlink(missing_ok=True)  # of the job before
    ended = run_job(folder, nodes, TRAIN.format(options=options))
    assert [end.code for end in ended] == [0] * nodes, ended
    assert len({end.out for end in ended}) == 1
    states, weights, updates = ended[0].out.split()
    return states, weights, updates


def test_what_four_nodes_have_saved_is_where_they_and_two_others_go_on(tmp_path: Path) -> None:
    four = train(tmp_path, 4, 0, 3, False, True, str(tmp_path), "adam", True)
    before = (tmp_path / "states").read_bytes()
    without = train(tmp_path, 4, 0, 4, False, False, str(tmp_path), "adam", True)
    assert train(tmp_path, 4, 3, 4, True, False, str(tmp_path), "adam", True) == without != four
    two = train(tmp_path, 2, 3, 3, True, True, str(tmp_path), "adam", True)  # resumed, and saved at once
    assert two == four
    assert (tmp_path / "states").read_bytes() == before
    assert train(tmp_path, 2, 3, 4, True, False, str(tmp_path), "adam", True) != four


def test_without_the_optimiser_in_the_file_states_are_read_and_counts_begin_anew(tmp_path: Path) -> None:
    four = train(tmp_path, 4, 0, 3, False, True, str(tmp_path), "sgd", False)
    two = train(tmp_path, 2, 3, 3, True, False, str(tmp_path), "sgd", False)
    assert two[:2] == four[:2]
    assert (four[2], two[2]) == ("6", "0")

"""Training that stops, and goes on with another number of nodes: the states are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Sums and updates of integers: with SGD all numbers are exact.
TRAIN = """
import numpy as np
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates import digest_of

SAVES, FOLDER = {saves!r}, {folder!r}
SHAPES = {{"a": (40, 30), "b": (7,)}}

def begun(name, weights):
    kv = mx.kv.create("dist_sync_netstorm")
    more = dict(momentum=0.5) if name == "sgd" else {{}}
    kv.set_optimizer(mx.optimizer.create(name, learning_rate=2.0**-4, rescale_grad=1.0, **more))
    for key in SHAPES:
        kv.init(key, weights[key])
    return kv

def trained(kv, *epochs):
    for epoch in epochs:
        for sample in range(kv.rank, 12, kv.num_workers):
            for key, shape in SHAPES.items():
                drawn = np.random.RandomState([epoch, sample, len(shape)]).randint(-3, 4, shape)
                kv.push(key, mx.nd.array(drawn))
    weights = {{key: mx.nd.zeros(shape) for key, shape in SHAPES.items()}}
    for key in SHAPES:
        kv.pull(key, out=weights[key])
    optimizer = kv._updater.optimizer
    print(digest_of(kv._updater.states), digest_of(weights), optimizer.num_update, flush=True)
    kv._barrier()  # all have read
    return weights

for name, whole in (("adam", True), ("sgd", False)):
    path = f"{{FOLDER}}/{{name}}"
    if SAVES:
        kv = begun(name, {{key: mx.nd.ones(shape) for key, shape in SHAPES.items()}})
        weights = trained(kv, 0, 1, 2)
    else:
        weights = mx.nd.load(f"{{path}}.weights")
        kv = begun(name, weights)
        kv.load_optimizer_states(f"{{path}}.states")
        trained(kv)
    if kv.rank == 0:
        kv.save_optimizer_states(f"{{path}}.{{'states' if SAVES else 'again'}}", dump_optimizer=whole)
        mx.nd.save(f"{{path}}.weights", weights)
    trained(kv, 3)
"""


def train(folder: Path, nodes: int, *, saves: bool) -> list[list[str]]:
    """Return, the same on all nodes, digests of states and weights and the number of updates: for each
    optimiser of what is saved or loaded, and after one more epoch."""
    (folder / "ready").unlink(missing_ok=True)  # of the job before
    ended = run_job(folder, nodes, TRAIN.format(saves=saves, folder=str(folder)))
    assert [end.code for end in ended] == [0] * nodes, ended
    assert len({end.out for end in ended}) == 1
    return [line.split() for line in ended[0].out.splitlines()]


def test_what_three_nodes_have_saved_is_where_they_and_two_others_go_on(tmp_path: Path) -> None:
    adam, adam_later, sgd, sgd_later = train(tmp_path, 3, saves=True)
    before = (tmp_path / "adam.states").read_bytes()
    three = train(tmp_path, 3, saves=False)
    assert three[:2] == [adam, adam_later]
    assert adam_later[:2] != adam[:2]
    assert (tmp_path / "adam.again").read_bytes() == before
    # Without the optimiser in the file, states are read and counts begin anew.
    assert three[2] == [*sgd[:2], "0"]
    assert three[3] == [*sgd_later[:2], "4"]
    assert (sgd[2], sgd_later[2]) == ("12", "16")
    two = train(tmp_path, 2, saves=False)
    assert two[0] == adam
    assert two[1] != adam_later
    assert two[2] == three[2]

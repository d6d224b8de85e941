"""Averages under codecs on three real nodes at two sites: what is sent, what is kept, and who has what.

Every rank knows the gradients of all, and computes what the average should be.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest

from netstorm.compression.auto import NetworkUse
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import HFA, LocalSGD
from tests.integration.mxnet.on_nodes import NODES, everywhere, on_nodes, same_everywhere, settled

VARIABLES = {rank: {"NETSTORM_SITE": site} for rank, site in enumerate(("east", "east", "west"))}

SHAPE = (200, 301)
"""More than one chunk."""

VALUES = SHAPE[0] * SHAPE[1]


def zeros() -> Any:
    return mx.nd.zeros(SHAPE)


def pulled(kv: Any, key: Any = "w") -> Any:
    out = zeros()
    kv.pull(key, out=out)
    return out.asnumpy()


def descent() -> Any:
    return mx.optimizer.SGD(learning_rate=1.0)


@functools.cache
def gradient(rank: int, step: int) -> Any:
    """Return a gradient of low rank with noise, the same at all ranks."""
    random = np.random.RandomState(1000 * rank + step)
    columns, rows = random.randn(SHAPE[0], 1), random.randn(1, SHAPE[1])
    return (columns @ rows + 0.1 * random.randn(*SHAPE)).astype(np.float32)


def train(kv: Any, steps: int, key: Any = "w", first: int = 0) -> None:
    for step in range(first, first + steps):
        kv.push(key, mx.nd.array(-gradient(kv.rank, step)))


@functools.cache
def learnt(steps: int) -> Any:
    """Return the mean of what ranks learn in so many steps from the first."""
    of_all = [gradient(rank, step).astype(np.float64) for rank in range(NODES) for step in range(steps)]
    return sum(of_all) / NODES


def check_mass(kv: Any, steps: int) -> None:
    """Check that what was applied and what ranks have kept is together all that they have learnt."""
    (entry,) = kv._keys.entries()
    residual = entry.residual["residual"].asnumpy().astype(np.float64)
    kept = everywhere(kv, float(np.abs(residual).sum()))
    whole = NODES * learnt(steps).sum()
    assert NODES * pulled(kv).astype(np.float64).sum() + sum(everywhere(kv, residual.sum())) == pytest.approx(
        whole, abs=1e-2
    )
    assert any(kept), "it keeps nothing: the test would not see what is lost"


@on_nodes
def test_int8_averages_changes_and_keeps_what_it_rounds_off(kv: Any) -> None:
    kv = LocalSGD(sync_every=2)
    kv.set_gradient_compression({"type": "int8"})
    kv.set_optimizer(descent())
    kv.init("w", mx.nd.full(SHAPE, 0.0))
    for round in range(4):
        train(kv, 2, first=2 * round)
        value = pulled(kv)
        assert same_everywhere(kv, mx.nd.array(value))
        # A number of int8 is off by at most half of a 127th of the largest magnitude of its block.
        assert np.abs(value - learnt(2 * round + 2)).max() < 0.5
    check_mass(kv, 8)


@on_nodes
def test_values_far_from_zero_lose_nothing_since_changes_travel(kv: Any) -> None:
    kv = LocalSGD(sync_every=1)
    kv.set_gradient_compression({"type": "int8"})
    kv.set_optimizer(descent())
    kv.init("w", mx.nd.full(SHAPE, 1024.0))
    kv.push("w", mx.nd.full(SHAPE, -(2.0**-7)))
    assert (pulled(kv) == 1024.0 + 2.0**-7).all()


@on_nodes
def test_powersgd_and_topk_send_little_and_conserve_what_was_learnt(kv: Any) -> None:
    for codec, least in (({"type": "powersgd", "rank": 2}, 8), ({"type": "topk", "ratio": 0.02}, 5)):
        kv = LocalSGD(sync_every=2)
        kv.set_gradient_compression(codec)
        kv.set_optimizer(descent())
        kv.init("w", zeros())
        settled(kv)
        before = kv.statistics()["bytes_sent"]
        train(kv, 8)
        value = pulled(kv)
        sent = kv.statistics()["bytes_sent"] - before
        # Along trees of three nodes a rank sends a sum once or twice: four averages of 4 bytes a value.
        assert sum(everywhere(kv, sent)) < 4 * 4 * VALUES * (NODES + 1) / least
        assert same_everywhere(kv, mx.nd.array(value))
        check_mass(kv, 8)


class SlowNetwork(NetworkUse):
    """A network that averages occupy for far longer than anything is computed, whatever the machine does."""

    def typical(self) -> tuple[float, float]:
        return 1.0, 0.01


@on_nodes
def test_auto_chooses_alike_at_all_ranks_and_conserves_what_was_learnt(kv: Any) -> None:
    for make in (lambda: LocalSGD(sync_every=2), lambda: HFA(k1=1, k2=2)):
        kv = make()
        with mock.patch("netstorm.compression.auto.NetworkUse", SlowNetwork):
            kv.set_gradient_compression({"type": "auto", "every": 2})
        kv.set_optimizer(descent())
        kv.init("w", zeros())
        train(kv, 16)
        value = pulled(kv)
        assert same_everywhere(kv, mx.nd.array(value))
        (entry,) = kv._keys.entries()
        kept = entry.residual or {}  # within a site one rank has it
        chosen = {float(kept["agreed"].asnumpy()[0])} if kept else set()
        chosen |= {place for place in everywhere(kv, max(chosen, default=-1.0)) if place >= 0}
        assert len(chosen) == 1
        assert not kept or "right" in kept  # it has used PowerSGD, and others, as times are always the same
        residual = kept["residual"].asnumpy().reshape(-1) if "residual" in kept else np.zeros(VALUES)
        for place in range(0, VALUES, VALUES // 7):
            missing = sum(everywhere(kv, float(residual[place])))
            expected = NODES * learnt(16).reshape(-1)[place]
            assert NODES * value.reshape(-1)[place] + missing == pytest.approx(expected, abs=0.1)


@on_nodes
def test_hfa_encodes_between_sites_alone_and_counts_each_rank_once(kv: Any) -> None:
    kv = HFA(k1=1, k2=2)
    kv.set_gradient_compression({"type": "int8"})
    kv.set_optimizer(descent())
    kv.init("w", zeros())
    for round in range(3):
        train(kv, 2, first=2 * round)
        value = pulled(kv)
        assert same_everywhere(kv, mx.nd.array(value))
        assert np.abs(value - learnt(2 * round + 2)).max() < 0.5
    (entry,) = kv._keys.entries()
    assert (entry.residual is not None) == kv.sites.is_leader
    settled(kv)
    before = kv.statistics()["bytes_sent"]
    train(kv, 2, first=6)
    pulled(kv)
    sent = kv.statistics()["bytes_sent"] - before
    if kv.rank == 2:  # it has no other rank at its site
        assert sent < 0.4 * 4 * VALUES
    kv._barrier()


@on_nodes
def test_rules_exempt_keys_and_other_types_need_one(kv: Any) -> None:
    kv = LocalSGD(sync_every=1)
    kv.set_gradient_compression({"plain*": "none", "*": "int8"})
    kv.set_optimizer(descent())
    kv.init(["w", "plain"], [zeros(), zeros()])
    kv.init("plain64", zeros().astype("float64"))
    with pytest.raises(UsageError, match="float32 only"):
        kv.init("w64", zeros().astype("float64"))
    train(kv, 1, "plain")
    assert np.allclose(pulled(kv, "plain"), learnt(1), atol=1e-5)
    train(kv, 1, "w")
    difference = np.abs(pulled(kv, "w") - learnt(1)).max()
    assert 1e-4 < difference < 0.5


@on_nodes
def test_a_codec_that_is_set_between_averages_begins_with_the_average_after_the_next(kv: Any) -> None:
    kv = LocalSGD(sync_every=2)
    kv.set_optimizer(descent())
    kv.init("w", zeros())
    train(kv, 1)
    kv.set_gradient_compression({"type": "topk", "ratio": 0.02})
    train(kv, 1, first=1)  # nobody remembers a value that all have had: values travel as they are
    assert np.allclose(pulled(kv), learnt(2), atol=1e-5)
    train(kv, 2, first=2)
    value = pulled(kv)
    assert same_everywhere(kv, mx.nd.array(value))
    assert np.count_nonzero(~np.isclose(value, learnt(2), atol=1e-5)) < 0.1 * VALUES


@on_nodes
def test_what_is_not_finite_at_one_rank_is_not_finite_at_all(kv: Any) -> None:
    kv = LocalSGD(sync_every=1)
    kv.set_gradient_compression({"type": "int8"})
    kv.set_optimizer(descent())
    kv.init("w", zeros())
    wrong = zeros()
    wrong[0, 0] = np.nan if kv.rank == 1 else 1.0
    kv.push("w", wrong)
    value = pulled(kv)
    assert np.isnan(value[0, 0])
    assert np.isfinite(value[10:]).all()

"""Roots and shares that stay: trees of the same roots, as good as other roots would be."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.settings.sections import _FREEZABLE
from netstorm.topology.form import form_policy
from netstorm.topology.network import FAMILIES, Network, Rank, generate
from netstorm.topology.policy import Options
from netstorm.topology.prediction import predict
from netstorm.topology.searched_schemes import FREEZABLE, frozen

BYTES, CHUNK = 16_000_000, 262_144
OPTIONS = Options(tensors=(BYTES,), chunk_bytes=CHUNK)


def seconds(network, policy):
    return predict(network, policy, (BYTES,), chunk_bytes=CHUNK).seconds


def test_settings_and_topology_agree_on_what_can_be_frozen():
    assert set(_FREEZABLE) == set(FREEZABLE)


@pytest.mark.parametrize("topology", sorted(FREEZABLE))
def test_each_chunk_keeps_its_root(topology):
    first = form_policy(generate("mesh", 6, 1), topology, tensors=(BYTES,), chunk_bytes=CHUNK)
    roots_of_first = [tree.root for tree in first.trees]
    later = frozen(
        generate("mesh", 6, 2), topology, roots_of_first, first.weights, OPTIONS, leads=first.leads
    )
    policy = later.policy(1)

    def roots(policy):
        return [policy.trees[policy.tree_of(slot)].root for slot in range(2 * sum(first.weights))]

    assert roots(policy) == roots(first)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_packing_with_the_roots_of_another_network_is_nearly_as_fast_as_one_with_its_own(family):
    network = generate(family, 9, 2)
    before = form_policy(generate(family, 9, 1), "packing", tensors=(BYTES,), chunk_bytes=CHUNK)
    own = form_policy(network, "packing", tensors=(BYTES,), chunk_bytes=CHUNK)
    found = frozen(network, "packing", [t.root for t in before.trees], before.weights, OPTIONS).policy(1)
    assert seconds(network, found) < 1.4 * seconds(network, own)
    if family in ("mesh", "asymmetric"):  # of others the links may be the same, or few
        assert seconds(network, found) < 0.7 * seconds(network, before)


def test_auto_takes_what_is_predicted_to_be_faster():
    network = generate("mesh", 6, 4)
    roots, weights = [Rank(0), Rank(3)], [3, 2]
    auto = frozen(network, "auto", roots, weights, OPTIONS).policy(1)
    others = [frozen(network, one, roots, weights, OPTIONS).policy(1) for one in ("fapt", "packing")]
    assert seconds(network, auto) == min(seconds(network, one) for one in others)


def test_a_topology_whose_roots_mean_nothing_is_refused():
    with pytest.raises(UsageError, match="frozen roots"):
        frozen(Network.uniform(3), "ring", [Rank(0)], [1], OPTIONS)

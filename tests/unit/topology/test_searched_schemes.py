"""The schemes that try several forests, and those that keep roots and shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netstorm.errors import Unreachable, UsageError
from netstorm.settings.sections import _FREEZABLE
from netstorm.topology.form import form_policy
from netstorm.topology.network import FAMILIES, Network, Rank, generate
from netstorm.topology.policy import Options
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Resources, fluid_time
from netstorm.topology.schemes import star
from netstorm.topology.searched_schemes import FREEZABLE, auto, candidates, expected, frozen
from netstorm.topology.tree import transfer_delays, tree_delay
from netstorm.units import format_duration

# ------------------------------------------------------------------------------------------------------ auto
# What the predictor chooses.


MB = 1_000_000


def seconds(network, forest, options):
    return predict(network, forest.policy(0), options.tensors, chunk_bytes=options.chunk_bytes).seconds


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud", "asymmetric"])
@pytest.mark.parametrize("size", [100_000, 4 * MB, 60 * MB])
def test_no_candidate_is_predicted_to_be_faster_than_the_chosen_one(family, size):
    network = generate(family, 6, 2)
    options = Options(tensors=(size // 3, size - size // 3), chunk_bytes=250_000)
    chosen = seconds(network, auto(network, options), options)
    others = [seconds(network, forest, options) for forest in candidates(network, options).values()]
    assert len(others) >= 3
    assert chosen == pytest.approx(min(others))


def test_a_large_tensor_wants_the_width_of_the_network_and_a_tiny_one_its_fastest_paths():
    network = generate("mesh", 9, 4)
    large = auto(network, Options(tensors=(200 * MB,)))
    tiny = auto(network, Options(tensors=(1000,)))
    assert large.reason.startswith("auto: packing, with ")
    assert len(large.trees) > 9
    delays = transfer_delays(network, 1000)
    least = min(
        tree_delay(tree, delays) for tree in candidates(network, Options(tensors=(1000,)))["fapt"].trees
    )
    (used,) = {tiny.policy(0).tree_of(0)}
    assert tree_delay(tiny.trees[used], delays) <= least


def test_the_reason_tells_what_was_predicted_for_each():
    reason = auto(Network.uniform(4), Options(tensors=(50 * MB,))).reason
    assert reason.startswith("auto: ")
    assert "predicted for 50MB" in reason
    for name in ("one fapt", "fapt", "packing"):
        assert name in reason


def test_what_cannot_win_is_not_predicted_and_the_reason_says_so():
    network = generate("mesh", 9, 4)
    options = Options(tensors=(200 * MB,), chunk_bytes=MB)
    forests = candidates(network, options)
    fluid = fluid_time(Resources.of(network), forests["one fapt"].policy(0), 200 * MB)
    assert fluid > 2 * seconds(network, forests["packing"], options)
    assert f"one fapt over {format_duration(fluid)}" in auto(network, options).reason


def test_while_no_rates_are_known_nothing_is_predicted_and_every_rank_is_a_root():
    network = generate("mesh", 6, 2)
    chosen = form_policy(network, "auto", known=False)
    assert chosen.trees == form_policy(network, "fapt", known=False).trees
    assert "no rates are known" in chosen.reason


def test_one_node_needs_no_choice():
    assert auto(Network.uniform(1), Options()).trees[0].size == 1


def test_ranks_that_cannot_be_reached_are_named():
    cut = Network.uniform(3)
    cut = replace(cut, links=tuple(link for link in cut.links if 2 not in (link.source, link.target)))
    with pytest.raises(Unreachable, match="2"):
        auto(cut, Options())


def test_where_events_would_take_long_the_fluid_time_and_the_depth_decide():
    network = generate("cloud", 96, 1)
    options = Options(tensors=(100 * MB,), chunk_bytes=250_000)
    forest = star(network)
    fluid = fluid_time(Resources.of(network), forest.policy(0), 100 * MB)
    depth = tree_delay(forest.trees[0], transfer_delays(network, 250_000))
    assert expected(network, forest, options) == pytest.approx(fluid + depth)


def test_few_chunks_are_followed_however_many_nodes_there_are():
    network = generate("cloud", 96, 1)
    options = Options(tensors=(MB,), chunk_bytes=250_000)
    forest = star(network)
    assert expected(network, forest, options) == seconds(network, forest, options)


# ---------------------------------------------------------------------------------------------------- frozen
# Roots and shares that stay: trees of the same roots, as good as other roots would be.


BYTES, CHUNK = 16_000_000, 262_144
OPTIONS = Options(tensors=(BYTES,), chunk_bytes=CHUNK)


def seconds_frozen(network, policy):
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
    assert seconds_frozen(network, found) < 1.4 * seconds_frozen(network, own)
    if family in ("mesh", "asymmetric"):  # of others the links may be the same, or few
        assert seconds_frozen(network, found) < 0.7 * seconds_frozen(network, before)


def test_auto_takes_what_is_predicted_to_be_faster():
    network = generate("mesh", 6, 4)
    roots, weights = [Rank(0), Rank(3)], [3, 2]
    auto = frozen(network, "auto", roots, weights, OPTIONS).policy(1)
    others = [frozen(network, one, roots, weights, OPTIONS).policy(1) for one in ("fapt", "packing")]
    assert seconds_frozen(network, auto) == min(seconds_frozen(network, one) for one in others)


def test_a_topology_whose_roots_mean_nothing_is_refused():
    with pytest.raises(UsageError, match="frozen roots"):
        frozen(Network.uniform(3), "ring", [Rank(0)], [1], OPTIONS)

"""The predictor, the optimum, and max-min fair rates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link
from netstorm.topology.lower_bound import latency_bound
from netstorm.topology.network import FAMILIES, Change, Network, Node, Rank, Routing, generate
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import MaxMin, chunks_of, predict
from netstorm.topology.resources import Resources, fluid_time, optimum, pair_loads
from netstorm.topology.schemes import fapt, star
from netstorm.topology.tree import Tree, transfer_delays, tree_delay
from tests.unit.topology.flow_program import flow_rate

# --------------------------------------------------------------------------------------------------- predict
# The predictor against times worked out by hand, and against bounds that no transfer can break.


MB = 1_000_000
RATE = 8e6  # 1 MB takes a second


def chain(nodes: int) -> Policy:
    tree = Tree.undirected(Rank(0), tuple(range(-1, nodes - 1)))
    return Policy(version=0, trees=(tree,), weights=(1,))


def star_at_0(nodes: int) -> Policy:
    return Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, *[0] * (nodes - 1))),), weights=(1,))


def seconds(network: Network, policy: Policy, *tensors: int, start: float = 0.0) -> float:
    return predict(network, policy, tensors, chunk_bytes=MB, start=start).seconds


def test_one_chunk_is_stored_and_forwarded_on_every_hop_up_and_down():
    network = Network.uniform(4, rate=RATE, latency=0.25)
    assert seconds(network, chain(4), MB) == pytest.approx(6 * 1.25)


def test_more_chunks_fill_the_pipeline():
    # The last of 10 chunks leaves the leaf after 10 s, and has 5 more hops of 1.25 s.
    network = Network.uniform(4, rate=RATE, latency=0.25)
    assert seconds(network, chain(4), 10 * MB) == pytest.approx(10 + 0.25 + 5 * 1.25)


def test_half_a_chunk_takes_half_the_time():
    assert seconds(Network.uniform(2, rate=RATE), chain(2), MB // 2) == pytest.approx(2 * 0.5)


def test_children_of_one_hub_share_its_access_line_and_no_other():
    network = Network.uniform(4, rate=RATE)
    assert seconds(network, star_at_0(4), MB) == pytest.approx(1 + 1)
    capped = replace(network, nodes=(Node(rank=Rank(0), ingress=RATE), *network.nodes[1:]))
    assert seconds(capped, star_at_0(4), MB) == pytest.approx(3 + 1)


def test_routed_pairs_share_the_links_under_them():
    line = Network.uniform(3, rate=RATE)
    ends = ((0, 1), (1, 0), (1, 2), (2, 1))
    line = replace(
        line,
        links=tuple(link for link in line.links if (link.source, link.target) in ends),
        routing=Routing.UNDERLAY,
    )
    # 2→0 and 1→0 share 1→0 at half its rate each, both for 2 s; and the same downwards.
    assert seconds(line, star_at_0(3), MB) == pytest.approx(2 + 2)


def test_loss_lowers_goodput():
    network = Network.uniform(2, rate=RATE)
    lossy = replace(network, links=tuple(replace(link, loss=0.2) for link in network.links))
    assert seconds(lossy, chain(2), MB) == pytest.approx(2 / 0.8)


def test_a_change_of_rate_holds_also_for_what_is_under_way():
    change = Change(at=10.5, source=Rank(1), target=Rank(0), rate=RATE / 2)
    network = replace(Network.uniform(2, rate=RATE), changes=(change,))
    assert seconds(network, chain(2), MB) == pytest.approx(2)
    assert seconds(network, chain(2), MB, start=10.0) == pytest.approx(0.5 + 1 + 1)
    assert seconds(network, chain(2), MB, start=11.0) == pytest.approx(2 + 1)


def test_the_most_urgent_chunk_goes_first_on_each_connection():
    # One chunk goes over a slow link first, so that it comes to rank 1 after 10 s, when all the others wait
    # there for 1→0. It overtakes those beyond the window, or its longer way down would end after theirs.
    network = Network.uniform(3, rate=RATE)
    slow = tuple(
        replace(link, rate=RATE / 10) if (link.source, link.target) == (2, 1) else link
        for link in network.links
    )
    through_1 = Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 0, 1))
    direct = Tree.undirected(Rank(0), (-1, 0, 0))
    policy = Policy(version=0, trees=(through_1, direct), weights=(1, 25))
    assert seconds(replace(network, links=slow), policy, 26 * MB) == pytest.approx(26 + 1)


def test_small_tensors_share_slots_as_their_bytes_do():
    policy = Policy(version=0, trees=(chain(3).trees[0], star_at_0(3).trees[0]), weights=(1, 1))
    trees = [chunk.tree for chunk in chunks_of(policy, [MB // 2] * 4, MB)]
    assert trees[0] == trees[1] != trees[2] == trees[3]
    assert [chunk.bits for chunk in chunks_of(policy, [2 * MB + 4], MB)] == [8 * MB, 8 * MB, 32]


def test_bits_are_what_the_trees_put_on_links():
    found = predict(Network.uniform(3, rate=RATE), chain(3), [5 * MB + 4], chunk_bytes=MB)
    assert found.bits == dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1)), 8 * (5 * MB + 4))


def test_one_node_and_no_bytes_take_no_time():
    alone = Policy(version=0, trees=(Tree.undirected(Rank(0), (-1,)),), weights=(1,))
    assert seconds(Network.uniform(1), alone, MB) == 0.0
    assert seconds(Network.uniform(3), chain(3)) == 0.0
    assert seconds(Network.uniform(3), chain(3), 0) == 0.0


@given(
    networks(min_nodes=2, max_nodes=6, capped=True, changing=True, routing=None),
    st.integers(0, 2),
    st.lists(st.integers(1, 3 * MB), min_size=1, max_size=4),
)
def test_no_prediction_beats_the_fluid_time_or_the_latency_of_a_chunk(network, roots, tensors):
    network = replace(network, changes=())
    policy = fapt(network, min(roots, network.size)).policy(0)
    chunk_bytes = 256 * 1024
    found = predict(network, policy, tensors, chunk_bytes=chunk_bytes)
    resources = Resources.of(network)
    volumes = [0.0] * len(resources.pairs)
    for pair, bits in found.bits.items():
        volumes[resources.place(pair)] = bits
    loads = resources.matrix @ volumes
    assert found.seconds >= float((loads / resources.capacities).max()) * (1 - 1e-6)
    smallest = transfer_delays(network, min(*tensors, chunk_bytes))
    assert found.seconds >= min(tree_delay(tree, smallest) for tree in policy.trees) * (1 - 1e-6)
    total = sum(chunk.bits for chunk in chunks_of(policy, tensors, chunk_bytes))
    assert sum(found.bits.values()) == pytest.approx(2 * (network.size - 1) * total)


@settings(max_examples=12)
@given(networks(min_nodes=2, max_nodes=6, capped=True, changing=True, routing=None))
def test_the_same_question_has_the_same_answer(network):
    policy = fapt(network).policy(0)
    one, other = (predict(network, policy, [MB, 2 * MB], chunk_bytes=256 * 1024) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud", "asymmetric"])
def test_merged_chunks_tell_nearly_the_same(family):
    network = generate(family, 9, 3)
    policy = star(network, None).policy(0)
    exact = predict(network, policy, [100 * MB], chunk_bytes=128 * 1024).seconds
    merged = predict(network, policy, [100 * MB], chunk_bytes=128 * 1024, most_chunks=400).seconds
    assert merged == pytest.approx(exact, rel=0.03)
    fluid = fluid_time(Resources.of(network), policy, 100 * MB)
    assert fluid <= exact <= 1.1 * fluid


def test_senseless_questions_are_refused():
    network = Network.uniform(3)
    with pytest.raises(UsageError, match="at least 1 byte"):
        predict(network, chain(3), [MB], chunk_bytes=0)
    with pytest.raises(UsageError, match="no negative sizes"):
        predict(network, chain(3), [-1], chunk_bytes=MB)
    with pytest.raises(UsageError, match="start is -1"):
        predict(network, chain(3), [MB], chunk_bytes=MB, start=-1)
    with pytest.raises(UsageError, match="trees of 4 ranks for a network of 3"):
        predict(network, chain(4), [MB], chunk_bytes=MB)


@given(networks(2, 6, symmetric=None, capped=True, routing=None), st.integers(1, 60))
def test_what_is_known_at_once_is_what_comes_of_rates_that_are_worked_out_at_every_step(network, megabytes):
    link = network.links[0]
    later = Change(at=1e8, source=link.source, target=link.target, rate=link.rate)
    stepwise = replace(network, changes=(later,))
    policy = replace(fapt(network), look_ahead=8 * MB, look_ahead_s=1.0).policy(0)
    assert seconds(network, policy, megabytes * MB) == pytest.approx(
        seconds(stepwise, policy, megabytes * MB), rel=1e-6
    )


# --------------------------------------------------------------------------------------------------- optimum
# The optimum against a program of flows written apart from it, and against what theory gives.


@given(networks(2, 5, symmetric=None, capped=True, routing=None))
def test_cutting_planes_find_what_a_program_of_flows_finds(network):
    found = optimum(network, MB)
    assert found.rate == pytest.approx(flow_rate(network, found.rate), rel=3e-4)
    assert found.seconds == pytest.approx(8 * MB / found.rate)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [6, 9])
def test_cutting_planes_find_it_in_networks_of_the_studied_kinds(family, nodes):
    network = generate(family, nodes, seed=nodes)
    found = optimum(network, MB).rate
    assert found == pytest.approx(flow_rate(network, found), rel=3e-4)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_in_a_mesh_of_equal_links_all_of_them_are_filled(size):
    # A tree uses 2(N - 1) of the N(N - 1) directed links for each bit of the tensor.
    assert optimum(Network.uniform(size, rate=RATE), MB).rate == pytest.approx(RATE * size / 2, rel=2e-4)


def test_a_node_behind_one_line_must_take_in_the_whole_sum_or_send_its_whole_addend_over_it():
    line = Network.uniform(4, rate=RATE)
    capped = replace(line, nodes=(*line.nodes[:3], Node(rank=Rank(3), egress=RATE / 2)))
    # Out of rank 3 go its addend for the trees of other roots and the results of its own: all of the tensor.
    assert optimum(capped, MB).rate == pytest.approx(RATE / 2, rel=2e-4)


def test_a_bridge_is_crossed_by_the_whole_tensor_each_way():
    ends = ((0, 1), (1, 0), (1, 2), (2, 1))
    links = tuple(Link(source=Rank(a), target=Rank(b), rate=RATE) for a, b in ends)
    chain = replace(Network.uniform(3), links=links)
    assert optimum(chain, MB).rate == pytest.approx(RATE, rel=2e-4)
    assert optimum(replace(chain, routing=Routing.UNDERLAY), MB).rate == pytest.approx(RATE, rel=2e-4)


def test_one_slow_line_among_very_fast_ones_is_not_lost_in_rounding():
    fast = Network.uniform(4, rate=100e9)
    slow = replace(fast, nodes=(*fast.nodes[:3], Node(rank=Rank(3), ingress=50e3)))
    assert optimum(slow, MB).rate == pytest.approx(50e3, rel=2e-4)


def test_the_gap_tells_how_far_above_what_is_achievable_the_result_may_be():
    network = generate("cloud", 9, 0)
    exact, rough = optimum(network, MB, gap=1e-7), optimum(network, MB, gap=0.1)
    assert exact.gap <= 1e-6
    assert exact.rate * (1 - 1e-6) <= rough.rate <= exact.rate * (1 + rough.gap + 1e-6)


@st.composite
def networks_with_a_tree(draw: st.DrawFn) -> tuple[Network, Tree]:
    """Return a network, and any tree in it: each node's parents were there before."""
    network = draw(networks(2, 6, symmetric=None, capped=True, routing=None))
    pairs = set(network.pairs())
    order = draw(st.permutations(network.ranks))
    parents: list[list[int]] = [[-1] * network.size for _ in range(2)]
    for number, rank in enumerate(order[1:], 1):
        before = order[:number]
        up = [other for other in before if (rank, other) in pairs]
        down = [other for other in before if (other, rank) in pairs]
        assume(up and down)
        parents[0][rank], parents[1][rank] = draw(st.sampled_from(up)), draw(st.sampled_from(down))
    return network, Tree(
        root=Rank(order[0]), reduce_parent=tuple(parents[0]), broadcast_parent=tuple(parents[1])
    )


@settings(max_examples=100)
@given(networks_with_a_tree())
def test_the_proof_of_an_optimum_holds_for_any_tree(network_and_tree):
    """By the prices a bit costs at least 1 in each tree, and all that is sent in a second costs the rate."""
    network, tree = network_and_tree
    found = optimum(network, MB)
    by_name = {price.name: price for price in found.prices}
    assert sum(price.share for price in found.prices) == pytest.approx(1.0, rel=1e-3)
    resources = Resources.of(network)
    loads = resources.loads(pair_loads(resources, [tree], [1.0]))
    cost = sum(
        load * by_name[name].share * found.rate / by_name[name].capacity
        for name, load in zip(resources.names, loads, strict=True)
        if name in by_name
    )
    assert cost >= 1 - 1e-3


@settings(max_examples=30)
@given(networks(2, 5, symmetric=None, capped=False, routing=Routing.OVERLAY), st.floats(0.01, 2.0))
def test_a_faster_link_is_worth_no_more_than_its_share(network, more):
    found = optimum(network, MB)
    for price in found.prices[:3]:
        links = tuple(
            replace(link, rate=link.rate * (1 + more)) if str(link) == price.name else link
            for link in network.links
        )
        faster = optimum(replace(network, links=links), MB)
        assert faster.rate <= found.rate * (1 + more * price.share) * (1 + 1e-3)


def test_the_reason_names_the_nodes_and_links_that_everything_must_pass():
    line = Network.uniform(4, rate=RATE)
    capped = replace(line, nodes=(*line.nodes[:3], Node(rank=Rank(3), egress=RATE / 2)))
    found = optimum(capped, MB)
    assert found.sets == ((3,),)
    assert found.reason() == (
        "everything must pass between rank 3 and the other nodes,\nover egress of rank 3 (4Mbit/s, 100%)"
    )
    assert optimum(Network.uniform(1), MB).reason() == ""


def test_the_bound_counts_the_latency_of_the_last_bit():
    network = Network.uniform(2, rate=RATE, latency=0.25)
    assert optimum(network, MB).bound_s == pytest.approx(1.25)


def test_one_rank_alone_takes_no_time():
    assert optimum(Network.uniform(1), MB).seconds == 0.0
    assert latency_bound(Network.uniform(1), MB) == 0.0


def test_ranks_without_a_path_are_named():
    cut = Network.uniform(3)
    cut = replace(cut, links=tuple(link for link in cut.links if link.source != 2))
    with pytest.raises(Unreachable, match=r"no path from ranks \(2,\) to ranks \(0, 1\)"):
        optimum(cut, MB)


def test_the_latency_bound_is_the_way_of_the_last_bit_to_the_farthest_rank():
    network = Network.uniform(2, rate=RATE, latency=0.25)
    assert latency_bound(network, MB) == pytest.approx(1 + 0.25)
    far = Network.uniform(3, rate=RATE, latency=0.25)
    links = tuple(
        replace(link, latency=2.0) if {link.source, link.target} == {0, 2} else link for link in far.links
    )
    # Over rank 1 in half a second; the far link would only be of use after two.
    assert latency_bound(replace(far, links=links), MB) == pytest.approx(1 + 0.5)


# -------------------------------------------------------------------------------------------- predict maxmin
# Max-min fair rates against progressive filling from scratch.


def filled(uses, capacities, started):
    """Return the rates by definition: raise all alike; what meets a full resource stays as it is."""
    rates = dict.fromkeys(started, 0.0)
    left = list(capacities)
    rising = set(started)
    while rising:
        counts = [sum(resource in uses[flow] for flow in rising) for resource in range(len(left))]
        step, full = min((left[r] / counts[r], r) for r in range(len(left)) if counts[r])
        for flow in rising:
            rates[flow] += step
        for resource, count in enumerate(counts):
            left[resource] -= step * count
        left[full] = 0.0
        stopped = {flow for flow in rising if any(left[r] <= 1e-9 * capacities[r] for r in uses[flow])}
        rising -= stopped
    return rates


@st.composite
def sharings(draw):
    resources = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.integers(1, 20).map(float), min_size=resources, max_size=resources))
    uses = draw(
        st.lists(
            st.lists(st.integers(0, resources - 1), min_size=1, max_size=4, unique=True),
            min_size=1,
            max_size=9,
        )
    )
    return uses, capacities


@given(sharings(), st.data())
def test_rates_are_those_of_progressive_filling_whatever_comes_and_goes(sharing, data):
    uses, capacities = sharing
    shared = MaxMin(capacities)
    later = list(uses)
    uses = []
    started: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if uses else 1, len(later)))) if later else ():
            assert shared.add(later[0]) == len(uses)
            uses.append(later.pop(0))
        for flow in data.draw(st.sets(st.integers(0, len(uses) - 1), max_size=3)):
            if not uses[flow]:
                continue
            if flow in started:
                started.remove(flow)
                shared.stop(flow)
            else:
                started.add(flow)
                shared.start(flow)
        if data.draw(st.booleans()):
            if data.draw(st.booleans()) and uses[0]:
                shared.remove(0)
                started.discard(0)
                uses[0] = []
            capacities = data.draw(
                st.lists(st.integers(1, 20).map(float), min_size=len(capacities), max_size=len(capacities))
            )
            shared.set_capacities(capacities)
        before = list(shared.rates)
        changed = shared.settle()
        expected = filled(uses, capacities, started)
        for flow in range(len(uses)):
            assert shared.rates[flow] == pytest.approx(expected.get(flow, 0.0), rel=1e-6)
            if flow in started and not math.isclose(before[flow], expected[flow], rel_tol=1e-6):
                assert flow in changed


def test_what_one_flow_cannot_use_goes_to_the_others():
    # Three flows over a line of 12; one of them has an access of 2.
    shared = MaxMin([12.0, 2.0])
    for uses in ([0], [0], [0, 1]):
        shared.start(shared.add(uses))
    assert sorted(shared.settle()) == [0, 1, 2]
    assert shared.rates == [5.0, 5.0, 2.0]
    shared.stop(0)
    assert shared.settle() == [1]
    assert shared.rates == [0.0, 10.0, 2.0]

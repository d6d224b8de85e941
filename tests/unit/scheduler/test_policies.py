"""When a policy is formed anew, and when what was formed is taken."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from netstorm.protocol.messages import KeySpec, LinkMeasure, Measured
from netstorm.scheduler.awareness import Collector
from netstorm.scheduler.options import chunk_sizes
from netstorm.scheduler.policies import (
    Adaptation,
    Awareness,
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    MeasuredRounds,
    PolicySettings,
    Workload,
    first_policy,
    initial_assumptions,
    is_better,
    tree_pairs,
)
from netstorm.scheduler.policy_former import form
from netstorm.scheduler.rounds import KeyRegistry
from netstorm.settings import Settings
from netstorm.topology.network import Network, Rank, Routing, internet2, mesh
from netstorm.topology.policy import Detour

WORKLOAD = Workload((8_000_000, 4_000_000), 262_144)


class Scheduled:
    """An adaptation that is told what a network is like, with noise, every second of virtual time."""

    def __init__(
        self, network, *, known=False, find_routes=False, error=0.05, seed=0, formation_s=0.5, **plan
    ):
        self.truth = network
        self.error = error
        self.chance = random.Random(seed)
        self.now = 0.0
        assumptions = InitialAssumptions(
            network=network if known else Network.uniform(network.size),
            known=known,
            settings=PolicySettings(**plan),
            workload=WORKLOAD,
        )
        self.summed = None
        self.policy = first_policy(assumptions)
        self.collector = Collector(assumptions.network, known=known, find_routes=find_routes)
        self.adaptation = Adaptation(assumptions, self.collector, self.policy, 0.0)
        self.formation_s = formation_s
        self.answer: Any = None
        self.asked = []
        self.installed = []

    def report(self, sources=None):
        for target in range(self.truth.size):
            measures = tuple(
                LinkMeasure(
                    source=source,
                    rate=max(
                        1e3,
                        self.truth.link(Rank(source), Rank(target)).rate
                        * (1 + self.chance.gauss(0, self.error)),
                    ),
                    error=self.error,
                    latency=self.truth.link(Rank(source), Rank(target)).latency,
                    chunks=5,
                )
                for source in self.truth.ranks
                if source != target and (sources is None or source in sources)
            )
            self.collector.record(target, Measured(links=measures), self.now)

    def sums(self, tensors):
        self.summed = Workload(tensors, WORKLOAD.chunk_bytes)
        self.adaptation.record_workload(self.summed, self.now)

    def second(self, *, reports=True):
        self.now += 1.0
        if reports:
            self.report()
        self.look()

    def look(self):
        if self.answer is not None and self.now >= self.answer[0]:
            policy = self.adaptation.decide(self.answer[1], self.policy)
            self.answer = None
            if policy is not None:
                self.policy = policy
                self.installed.append((self.now, policy))
        question = self.adaptation.poll(self.policy, self.summed, self.now)
        if question is not None:
            self.asked.append((self.now, question))
            self.answer = (self.now + self.formation_s, form(question))

    def run(self, seconds, **options):
        for _ in range(seconds):
            self.second(**options)


def four(*rates):
    """Return a mesh of four whose rank 0 has these rates to and from the others, in Mbit/s."""
    network = Network.uniform(4, rate=100e6, latency=0.01)
    return replace(
        network,
        links=tuple(
            replace(link, rate=rates[max(link.source, link.target) - 1] * 1e6)
            if 0 in (link.source, link.target)
            else link
            for link in network.links
        ),
    )


SLOW = four(100, 100, 10)
EQUAL = four(100, 100, 100)


@pytest.mark.parametrize(("known", "tensors"), [(True, WORKLOAD.tensors), (False, (100_000,)), (False, None)])
def test_nothing_is_formed_before_anything_is_measured_or_summed_that_was_not_assumed(known, tensors):
    job = Scheduled(SLOW, known=known)
    if tensors is not None:
        job.sums(tensors)
    job.run(60, reports=False)
    assert not job.asked


def test_the_assumption_that_all_links_are_equal_goes_as_soon_as_enough_is_measured():
    job = Scheduled(SLOW)
    job.run(8)
    (when, _), *_ = job.asked
    assert when == 5.0
    assert job.installed[0][0] <= 6.0
    assert "12 of 12 links are measured" in job.installed[0][1].reason
    assert "instead of" in job.installed[0][1].reason
    assert job.policy.version == 2


def told_round_trips(job):
    for source in job.truth.ranks:
        trips = tuple(
            LinkMeasure(
                source=target, rate=0.0, error=0.0, trip=2 * job.truth.link(source, Rank(target)).latency
            )
            for target in job.truth.ranks
            if target != source
        )
        job.collector.record(source, Measured(links=(), outgoing=trips), job.now)


def test_when_latencies_say_which_pairs_have_no_line_trees_leave_these_at_once():
    backbone = replace(internet2(9, 2).at(0.0), changes=())
    job = Scheduled(backbone, find_routes=True, topology="auto")
    job.now = 0.2
    told_round_trips(job)
    assert job.adaptation.due() == pytest.approx(0.5)
    job.now = 0.5
    job.look()
    assert job.asked == []  # the first policy is not older than that
    job.second(reports=False)
    job.second(reports=False)
    [(asked, question)] = job.asked
    assert asked == 1.5
    assert question.routing is Routing.UNDERLAY
    [(_, policy)] = job.installed
    assert "pairs of nodes are routes over others" in policy.reason
    assert policy.takes_over
    lines = {(int(link.source), int(link.target)) for link in backbone.links}
    assert len(tree_pairs(policy) - lines) <= 4
    job.run(10)
    assert "links are measured" in job.installed[1][1].reason
    assert job.installed[1][0] <= 5.0  # not an update time later
    job.run(30)
    assert len(job.installed) <= 3


def test_few_measured_links_will_do_after_a_while():
    job = Scheduled(SLOW)
    for _ in range(40):
        job.now += 1.0
        job.report(sources=(0,))
        job.look()
    assert job.asked
    assert 15.0 <= job.asked[0][0] <= 21.0


def test_equal_links_that_were_assumed_to_be_equal_keep_the_policy():
    job = Scheduled(EQUAL)
    job.run(60)
    assert job.asked
    assert job.installed == []


def test_a_known_network_that_is_as_it_was_said_to_be_is_not_looked_at_again():
    job = Scheduled(SLOW, known=True)
    job.summed = WORKLOAD
    job.run(60)
    assert job.asked == []


def test_a_link_that_moves_by_more_than_the_threshold_brings_a_better_policy_before_the_next_update_time():
    job = Scheduled(EQUAL, known=True, error=0.02)
    job.run(31)
    assert job.installed == []
    job.truth = SLOW
    job.run(4)  # two reports that agree, a second, the formation
    ((_, policy),) = job.installed
    assert "link" in policy.reason
    assert "100Mbit/s" in policy.reason


def test_a_policy_that_takes_over_says_what_has_become_slow_since_the_last_one_did():
    job = Scheduled(EQUAL, known=True, error=0.01)
    job.run(20)
    slow = []
    for truth in (SLOW, EQUAL, four(100, 9, 100), four(100, 9, 8)):
        job.truth = truth
        job.installed.clear()
        job.run(12)
        slow += [
            set(policy.slow) for _, policy in job.installed if policy.takes_over and not policy.keeps_begun
        ]
        assert not any(policy.slow for _, policy in job.installed if not policy.takes_over)
    assert slow == [{(0, 3), (3, 0)}, {(0, 2), (2, 0)}, {(0, 3), (3, 0)}]


def test_a_policy_that_gains_less_than_to_send_once_more_costs_keeps_what_has_begun():
    took = {}
    for rate in (9, 60):
        job = Scheduled(EQUAL, known=True, error=0.01)
        job.summed = Workload((80_000_000,), WORKLOAD.chunk_bytes)
        job.run(20)
        job.installed.clear()
        job.truth = four(100, rate, 100)
        job.run(12)
        took[rate] = [(policy.takes_over, policy.keeps_begun) for _, policy in job.installed][-1]
    assert took == {9: (True, False), 60: (True, True)}


def test_a_move_smaller_than_the_threshold_is_not_looked_at():
    job = Scheduled(EQUAL, known=True, error=0.02, update_rate=0.3)
    job.run(20)
    job.truth = four(85, 100, 100)
    job.run(40)
    assert job.asked == []


def test_with_an_update_rate_of_zero_a_policy_is_taken_every_update_time_whatever_it_gains():
    job = Scheduled(
        mesh(5, seed=3), known=True, error=0.1, update_rate=0.0, freeze_roots=True, topology="fapt"
    )
    before = job.policy
    job.run(60)
    taken = [at for at, _ in job.installed]
    assert len(taken) >= 5
    assert min(later - at for at, later in pairwise(taken)) >= 5.0
    for _, policy in job.installed:
        assert policy.weights == before.weights
        assert not policy.takes_over
    job.run(60, reports=False)
    assert len(job.installed) <= len(taken) + 1


def test_with_an_update_rate_of_zero_another_workload_waits_for_the_next_update_time_and_is_not_polled_for():
    job = Scheduled(SLOW, known=True, update_rate=0.0, topology="fapt")
    job.sums((100_000,) * 3)
    for _ in range(4):
        job.second()
        assert job.adaptation.due() > job.now
    job.run(20)
    assert job.asked[0][1].options.tensors == (100_000,) * 3


@pytest.mark.parametrize("error", [0.05, 0.1])
def test_noise_of_the_size_of_the_error_never_changes_a_policy(error):
    job = Scheduled(mesh(5, seed=3), error=error)
    job.run(60)
    settled = len(job.installed)
    job.run(240)
    assert len(job.installed) == settled


def test_a_rate_that_reports_overstate_does_not_flip_policies_back_and_forth():
    job = Scheduled(EQUAL, known=True, error=0.3)
    job.run(100)
    assert len(job.installed) <= 1


def slowed_link(*, shared, round_s):
    """Return a job one of whose links looks slower, whose rounds take so many times what was predicted.

    Args:
        shared: some of its links are known to share a line.
        round_s: of a round under the policy in force, over the predicted time.
    """
    job = Scheduled(EQUAL, known=True, error=0.02)
    job.run(6)
    job.truth = SLOW
    while not job.installed:
        job.second()
    predicted_s = form(job.asked[-1][1]).seconds
    if shared:
        job.collector.record(1, Measured(links=(), ingress=250e6), job.now)
    job.adaptation.rounds.begin(job.policy, 3)
    for rank in range(3):
        job.adaptation.rounds.record(rank, 2, 0.9 * predicted_s)  # still under the policy before
        job.adaptation.rounds.record(rank, 3, 0.3 * predicted_s)  # not what is planned for
        job.adaptation.rounds.record(rank, 4, round_s * predicted_s)
    job.installed.clear()
    job.truth = four(10, 100, 10)
    job.run(12)
    return job


def test_where_links_share_lines_a_policy_must_be_better_than_what_rounds_really_take():
    job = slowed_link(shared=True, round_s=1.0)
    assert job.installed == []
    assert "that rounds confirm" in job.adaptation.reason
    assert slowed_link(shared=True, round_s=9.0).installed
    assert slowed_link(shared=False, round_s=1.0).installed


@pytest.mark.parametrize("shared", [False, True])
def test_where_links_share_lines_a_policy_has_time_for_a_whole_round_before_the_next_one(shared):
    job = Scheduled(EQUAL, known=True, error=0.02)
    job.summed = Workload((80_000_000,), WORKLOAD.chunk_bytes)
    job.run(6)
    job.truth = SLOW
    while not job.installed:
        job.second()
    formed_at, question = job.asked[-1]
    if shared:
        job.collector.record(1, Measured(links=(), ingress=250e6), job.now)
    job.adaptation.rounds.begin(job.policy, 3)
    job.truth = four(10, 100, 10)
    job.run(25)
    next_at = next(at for at, _ in job.asked if at > formed_at)
    assert (next_at > formed_at + 2 * form(question).seconds) == shared


def test_what_a_round_takes_is_the_median_of_what_more_than_half_of_the_nodes_say():
    rounds, policy = MeasuredRounds(), Scheduled(EQUAL).policy
    rounds.expect(policy.version, 1.0)
    rounds.begin(policy, 0)
    said = []
    for rank, seconds in enumerate((1.2, 1.1, 900.0, 0.6)):
        rounds.record(rank, 0, seconds - 0.1)
        rounds.record(rank, 1, seconds)
        said.append(rounds.seconds)
    assert said == [math.inf, math.inf, 1.2, pytest.approx(1.15)]
    rounds.begin(msgspec.structs.replace(policy, version=policy.version + 1), 2)
    rounds.record(0, 2, 1.0)
    assert rounds.seconds == math.inf


@pytest.mark.parametrize(
    ("before", "doubt", "taken"),
    [(1.12, 0.1, True), (1.12, 0.2, False), (1.08, 0.02, True), (1.08, 0.03, False), (1.04, 0.001, False)],
)
def test_a_policy_is_taken_for_ten_percent_or_for_five_that_are_certain(before, doubt, taken):
    result = FormationResult(number=1, seconds=1.0, seconds_before=before, gain=math.log(before), doubt=doubt)
    assert is_better(result, 0.02) == taken
    assert not is_better(msgspec.structs.replace(result, seconds_before=1.08, doubt=0.0), 0.02)  # none drawn


def test_a_policy_that_seemed_better_is_formed_again_once_estimates_are_more_certain():
    job = Scheduled(SLOW, known=True, error=0.02)
    job.truth = EQUAL
    while not job.asked:
        job.second()
    unsure = msgspec.structs.replace(form(job.asked[0][1]), doubt=9.0)
    assert unsure.seconds_before > 1.1 * unsure.seconds
    job.answer = (job.now, unsure)
    job.run(2)
    assert job.installed == []
    job.run(12)
    ((_, policy),) = job.installed
    assert policy.reason.startswith("estimates are more certain")


def test_a_link_that_has_failed_is_left_out():
    job = Scheduled(EQUAL, known=True)
    job.run(7)
    job.collector.exclude([(0, 1)])
    job.run(10)
    (_, policy) = job.installed[-1]
    assert all(tree.reduce_parent[0] != 1 and tree.broadcast_parent[1] != 0 for tree in policy.trees)
    assert "link 0→1 is gone" in policy.reason


def test_what_the_job_really_sums_counts_once_it_is_known():
    job = Scheduled(SLOW, known=True)
    job.sums((100_000,) * 3)
    assert job.adaptation.due() < 1
    job.run(1, reports=False)
    (_, question), *_ = job.asked
    assert question.options.tensors == (100_000,) * 3
    assert "sums" in job.adaptation.reason
    job.run(60, reports=False)
    assert len(job.asked) == 1


def test_keys_that_come_one_after_the_other_are_waited_for():
    job = Scheduled(SLOW, known=True)
    for number in range(10):
        job.now += 0.2
        job.sums((100_000,) * (number + 1))
        job.look()
    assert not job.asked
    job.run(2, reports=False)
    assert [len(question.options.tensors) for _, question in job.asked] == [10]


def test_frozen_roots_stay_and_their_shares_too():
    job = Scheduled(SLOW, freeze_roots=True, num_roots=2)
    roots, weights = [tree.root for tree in job.policy.trees], job.policy.weights
    job.run(20)
    assert job.installed
    assert [tree.root for tree in job.policy.trees] == roots
    assert job.policy.weights == weights


def test_an_answer_to_a_question_that_was_never_asked_is_ignored():
    job = Scheduled(SLOW)
    job.run(5)
    assert job.answer is not None
    _, answer = job.answer
    assert job.adaptation.decide(msgspec.structs.replace(answer, number=99), job.policy) is None
    assert job.adaptation.forming


def test_what_cannot_be_formed_leaves_the_policy_and_says_why():
    job = Scheduled(EQUAL, known=True)
    job.collector.exclude([(0, 1), (0, 2), (0, 3)])
    job.run(10)
    assert job.installed == []
    assert "no path" in job.adaptation.reason


def test_links_that_no_tree_uses_are_explored_also_once_they_have_been_measured():
    job = Scheduled(SLOW, auxiliary=True, explore=True, num_roots=1)
    job.run(20)
    assert job.installed
    explored = {pair for detour in job.policy.detours if detour.explore for pair in pairwise(detour.path)}
    unused = set(job.truth.linked_pairs()) - tree_pairs(job.policy)
    assert unused
    assert unused <= explored


def test_the_same_trees_with_other_detours_are_taken_without_a_prediction():
    job = Scheduled(EQUAL, known=True)
    job.run(5)
    job.truth = SLOW
    while not job.adaptation.forming:
        job.second()
    (_, answer) = job.answer
    detour = Detour(path=(0, 1, 2), links=((1e6, 0.0), (1e6, 0.0)))
    policy = msgspec.structs.replace(job.policy, detours=(detour,))
    answer = msgspec.structs.replace(answer, policy=policy, only_detours=True, seconds=0.0)
    found = job.adaptation.decide(answer, job.policy)
    assert found is not None
    assert (found.detours, found.version) == ((detour,), job.policy.version + 1)
    assert "the same trees" in found.reason


def test_small_moves_that_come_to_nothing_are_looked_at_less_and_less_often():
    job = Scheduled(EQUAL, known=True, error=0.02)
    chance = random.Random(5)
    for _ in range(200):
        if job.now % 4 == 0:  # the network wavers, by more than the threshold and less than is worth it
            job.truth = four(*(100 * math.exp(chance.choice((-0.07, 0.07))) for _ in range(3)))
        job.second()
    assert 3 <= len(job.asked) <= 200 / 5 / 3
    before = len(job.installed)
    job.truth = SLOW
    job.run(9)
    assert len(job.installed) > before


def looks_after(changes):
    """Return when the network is looked at whose links are noticed to have changed at these times, 10 s and
    more after the last look.
    """
    job = Scheduled(EQUAL, known=True, error=0.02)
    job.run(10)
    before = job.adaptation.due()
    job.collector.changes.extend(before - 0.5 + at for at in changes)
    return job.adaptation.due() - before + 0.5


def test_links_that_change_one_after_the_other_are_waited_for_but_not_for_ever():
    assert looks_after([0.0]) == pytest.approx(0.3)
    assert looks_after([0.0, 0.2, 0.45]) == pytest.approx(0.75)
    assert looks_after([0.25 * number for number in range(4)]) == pytest.approx(1.0)


def test_a_change_need_not_wait_because_the_formation_before_it_came_to_nothing():
    job = Scheduled(EQUAL, known=True, error=0.02, update_time_s=20.0)
    job.run(61)
    job.truth = four(100, 100, 160)  # worth a look, and no policy
    while not job.asked:
        job.second()
    assert not job.installed
    job.truth = SLOW
    job.run(6)  # a fifth of the update time, the next second, the formation
    assert len(job.installed) == 1


# ---------------------------------------------------------------- chunks on links that are known to be slow


def network_file(folder: Path, *rates: str) -> str:
    """Return the name of a file with a line of nodes, and these links between them."""
    file = folder / "network.yaml"
    nodes = ", ".join(f"{rank}: {{}}" for rank in range(len(rates) + 1))
    links = ", ".join(
        f"{{between: [{rank}, {rank + 1}], rate: {rate}, latency: 5ms}}" for rank, rate in enumerate(rates)
    )
    file.write_text(f"nodes: {{{nodes}}}\nlinks: [{links}]\n")
    return str(file)


@pytest.mark.parametrize(
    ("rates", "given", "smallest"),
    [
        pytest.param((155, 155, 20), {}, 32_768, id="fast"),
        pytest.param((30, 30, 155), {}, 16_384, id="slower"),
        pytest.param((14, 13, 2), {}, 8_192, id="slow"),
        pytest.param((1, 2, 3), {}, 8_192, id="very slow"),
        pytest.param((1, 2, 3), {"PROBE_CHUNK_SIZE": "64KiB"}, 16_384, id="but measuring"),
        pytest.param((1, 2, 3), {"CHUNK_SIZE": "32768"}, None, id="asked for"),
        pytest.param((1, 1, 1), {}, None, id="rates not known"),
    ],
)
def test_chunks_take_the_typical_link_20_ms_but_do_not_become_tiny(
    tmp_path: Path, rates: tuple[int, ...], given: dict[str, str], smallest: int | None
) -> None:
    file = network_file(tmp_path, *(f"{rate}Mbit" for rate in rates))
    settings = Settings.from_environment({"DMLC_NUM_WORKER": "4", "NETSTORM_NETWORK": file, **given})
    found = initial_assumptions(settings).chunks
    assert (found and (found.smallest, found.largest)) == (smallest and (smallest, 65_536))


# ------------------------------------------------------------------- whether a job follows what it measures


RATES = (
    "links: [{between: [0, 1], rate: 10Mbit, latency: 5ms}, {between: [1, 2], rate: 20Mbit, latency: 5ms}]"
)
NO_RATES = RATES.replace("20Mbit", "10Mbit")


@pytest.mark.parametrize(
    ("links", "switch", "follows"),
    [(RATES, {}, False), (RATES, {"ENABLE_AWARENESS": "1"}, True), (NO_RATES, {}, True), ("", {}, True)],
    ids=["rates", "rates, and asked to", "links only", "nothing"],
)
def test_rates_that_somebody_knows_are_believed_unless_it_is_asked_for(
    tmp_path: Path, links: str, switch: dict[str, str], *, follows: bool
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(f"nodes: {{0: {{}}, 1: {{}}, 2: {{}}}}\n{links}\n")
    given = {"DMLC_NUM_WORKER": "3", **({"NETSTORM_NETWORK": str(file)} if links else {}), **switch}
    assumption = initial_assumptions(Settings.from_environment(given))
    awareness = Awareness(assumption, first_policy(assumption), 0.0, one_machine=False)
    assert (awareness.due() < 1e9) == follows


@pytest.mark.parametrize(("topology", "forms"), [("auto", True), ("ring", False)])
def test_what_the_job_sums_is_planned_for_where_rates_are_believed_too(
    tmp_path: Path, topology: str, *, forms: bool
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(f"nodes: {{0: {{}}, 1: {{}}, 2: {{}}}}\nrouting: underlay\n{RATES}\n")
    given = {"DMLC_NUM_WORKER": "3", "NETSTORM_NETWORK": str(file), "NETSTORM_TOPOLOGY": topology}
    settings = Settings.from_environment(given)
    assumption = initial_assumptions(settings)
    policy = first_policy(assumption)
    awareness = Awareness(assumption, policy, 0.0, one_machine=False)
    keys = KeyRegistry(chunk_sizes(settings))
    keys.register(0, KeySpec(namespace=0, name="w", shape=(10_000,), dtype="float32"))
    awareness.record_keys(keys, 1.0)
    assert awareness.due() == (1.3 if forms else math.inf)
    question = awareness.poll(policy, keys, 2.0)
    assert isinstance(question, FormationRequest) == forms
    if isinstance(question, FormationRequest):
        assert question.options.tensors == (40_000,)
        assert not question.options.unmeasured  # what is believed need not be explored
    assert awareness.due() == math.inf

"""What part of the possible a system reaches while the network changes, and pictures of it."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.topology.files import load_network
from netstorm.topology.network import Change, Link, Network, Node, Rank

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch):
    """The benchmarks' own modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = (
        "harness.arguments",
        "harness.results",
        "race.course",
        "race.policy_log",
        "systems.base",
        "systems.entrants",
        "plot",
    )
    modules = {name.rsplit(".", 1)[-1]: importlib.import_module(name) for name in names}
    return SimpleNamespace(**modules, race_results=importlib.import_module("race.results"))


def pair(rate, *changes):
    """Return two linked nodes whose rates change at these times, both ways."""
    ends = [(Rank(0), Rank(1)), (Rank(1), Rank(0))]
    return Network(
        nodes=(Node(rank=Rank(0)), Node(rank=Rank(1))),
        links=tuple(Link(source=a, target=b, rate=rate, latency=0.01) for a, b in ends),
        changes=tuple(Change(at=at, source=a, target=b, rate=rate) for at, rate in changes for a, b in ends),
    )


def test_a_phase_begins_with_each_time_at_which_anything_changes(bench):
    phases = bench.course.networks_by_time(pair(8e6, (20, 4e6), (40, 16e6)))
    assert [begin for begin, _ in phases] == [0, 20, 40]
    assert [still.links[0].rate for _, still in phases] == [8e6, 4e6, 16e6]
    assert not any(still.changes for _, still in phases)


def test_the_last_phase_is_given_as_much_time_as_the_one_before_it(bench):
    assert bench.course.end_of_changes(pair(8e6, (20, 4e6), (50, 16e6))) == 80
    assert bench.course.end_of_changes(pair(8e6)) == 0
    scaled = bench.course.with_times_scaled(pair(8e6, (180, 4e6), (360, 16e6)), 1 / 9)
    assert bench.course.end_of_changes(scaled) == pytest.approx(60)


def test_a_repeated_course_begins_each_time_with_the_first_rates(bench):
    once = pair(8e6, (20, 4e6), (40, 16e6))
    twice = bench.course.with_course_repeated(once, 2)
    phases = bench.course.networks_by_time(twice)
    assert [begin for begin, _ in phases] == [0, 20, 40, 60, 80, 100]
    assert [still.links[0].rate for _, still in phases] == [8e6, 4e6, 16e6] * 2
    assert bench.course.end_of_changes(twice) == 120
    assert bench.course.with_course_repeated(once, 1) == once
    assert not bench.course.with_course_repeated(pair(8e6), 3).changes


def test_the_optimum_is_that_of_each_moment(bench):
    # Two nodes send 1 MB each way at 8 and then at 4 Mbit/s: 1 s a round, later 2 s.
    course = bench.course.Course.of(pair(8e6, (10, 4e6)), 1_000_000)
    assert course.optima == pytest.approx((1.0, 2.0), rel=1e-3)
    assert course.best(0, 10) == pytest.approx(10, rel=1e-3)
    assert course.best(8, 14) == pytest.approx(2 + 2, rel=1e-3)
    assert course.best(-1, 1) == pytest.approx(2, rel=1e-3)
    assert course.of_optimum([(0, 2.0), (9, 3.0)]) == pytest.approx(2 / (2 + 2), rel=1e-3)
    assert course.of_optimum([]) is None


def ran(bench, name, course, **rounds):
    """Return a row whose parts did rounds, given as (start, seconds)."""
    case = bench.base.Case(nodes=2, bytes=1_000_000)
    parts = {
        part: bench.results.Row(
            system=SimpleNamespace(name=part, settings={}), case=case,
            starts_s=[start for start, _ in known], rounds_s=[seconds for _, seconds in known],
        )
        for part, known in rounds.items()
    }  # fmt: skip
    entrant = bench.entrants.Entrant(name=name, systems=tuple(part.system for part in parts.values()))
    return bench.race_results.RaceRow(
        entrant=entrant, case=case, optimum_s=1.0, bound_s=1.1, goodput=0.9, parts=parts, course=course,
        bounds=replace(course, optima=(1.25, 2.5)),
    )  # fmt: skip


def dynamic_race(bench):
    course = bench.course.Course(begins=(0.0, 10.0), optima=(1.0, 2.0))
    network = {
        "file": "n.yaml", "nodes": 2, "rates_scale": 1.0, "loss": "0%", "backend": "", "congestion": "",
        "goodput": 0.9, "dynamic": True, "optimum_s": {"1000000": 1.0},
        "course": {"1000000": {"begins_s": course.begins, "optima_s": course.optima}},
    }  # fmt: skip
    rows = [
        ran(bench, "mxnet-star-best", course, a=[(0, 8.0), (8, 12.0)]),
        ran(bench, "mxnet-star-mean", course, a=[(0, 10.0)], b=[(0, 20.0), (20, 40.0)]),
        ran(bench, "netstorm-std", course, a=[(0, 2.0), (2, 2.0), (10, 4.0), (14, 2.0)]),
    ]
    return bench.race_results.RaceResults(network=network, machine={}, options={}, rows=rows)


def test_over_a_course_systems_are_compared_by_their_mean_round(bench):
    best, mean, ours = dynamic_race(bench).as_json()["results"]
    assert (best["mean_s"], mean["mean_s"], ours["mean_s"]) == (10.0, 20.0, 2.5)
    assert (ours["vs_star_best"], ours["vs_star_mean"]) == (4.0, 8.0)
    assert ours["of_optimum"] == pytest.approx(4 / (4 + 3))
    assert best["of_optimum"] == pytest.approx(2 / (10 + 5))
    assert ours["of_bound"] == pytest.approx(1.25 * ours["of_optimum"])
    # hub a: 1 round of 10 possible; hub b: 2 of 10 + 5 + 20: means of a round's share, the other way up.
    assert mean["of_optimum"] == pytest.approx(2 / (10 / 1 + 35 / 2))
    assert ours["parts"]["a"]["starts_s"] == [0, 2, 10, 14]


def test_new_policies_are_found_in_the_schedulers_log_and_placed_by_time(bench):
    lines = [
        "23:59:50 netstorm INFO all nodes are here: rank 0 (127.0.0.1:1)",
        "23:59:58 netstorm INFO policy version 1: link 0→1 is slower: 7 Mbit/s",
        "00:00:02 netstorm INFO policy version 1 stays: no better one",
        "00:00:07 netstorm INFO policy version 2: faster (formed in 0.02 s)",
    ]
    midnight = time.mktime((2024, 5, 2, 0, 0, 0, 0, 0, -1))
    found = bench.policy_log.policy_changes("\n".join(lines), midnight + 0.5)
    assert [(one.at_s, one.version) for one in found] == [(-2.5, 1), (6.5, 2)]
    assert found[1].reason.startswith("faster")


def test_a_factor_may_be_a_fraction(bench):
    assert bench.arguments.factor("1/9") == pytest.approx(1 / 9)
    assert bench.arguments.factor("0.5") == 0.5
    for text in ("0", "-1", "1/0", "nan", "inf", "fast"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            bench.arguments.factor(text)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_race_is_drawn_again_from_its_file(bench, tmp_path, kind):
    pytest.importorskip("matplotlib")
    found = dynamic_race(bench)
    change = bench.policy_log.PolicyChange(at_s=11.0, version=1, reason="slower")
    found.rows[2].parts["a"].policies.append(change)
    source, picture = tmp_path / "race.json", tmp_path / f"race.{kind}"
    found.save(source)
    assert bench.plot.main([str(source), str(picture), "--title", "Two sites"]) == 0
    assert picture.stat().st_size > 5000
    if kind == "svg":
        text = picture.read_text()
        assert "netstorm-std: 2.50 s, 57% of the optimum" in text
        assert "Two sites" in text


def test_several_files_make_one_picture_with_ratios_among_all(bench, tmp_path):
    found = dynamic_race(bench).as_json()
    found["network"] |= {"dynamic": False}
    peers = {**found, "results": [row for row in found["results"] if row["system"].startswith("mxnet")]}
    ours = {**found, "results": [{**found["results"][2], "vs_star_best": None}]}
    joined = bench.plot.joined([peers, ours])
    by_name = {row["system"]: row for row in joined["results"]}
    assert list(by_name) == ["mxnet-star-best", "mxnet-star-mean", "netstorm-std"]
    assert by_name["netstorm-std"]["vs_star_best"] == pytest.approx(10.0 / 2.0)
    path = tmp_path / "joined.json"
    path.write_text(json.dumps(joined))
    pytest.importorskip("matplotlib")
    assert bench.plot.main([str(path), str(tmp_path / "bars.svg")]) == 0
    assert "netstorm-std" in (tmp_path / "bars.svg").read_text()


@pytest.mark.parametrize("knowledge", ["rates", "links", "nothing"])
def test_netstorm_is_told_what_was_asked_for_and_never_what_comes_later(bench, tmp_path, knowledge):
    network = load_network(ROOT / "examples" / "networks" / "internet2.yaml")
    entry = bench.entrants.Entry(network=network, folder=tmp_path, bytes=1_000_000, knowledge=knowledge)
    [entrant] = bench.entrants.enter(["netstorm-std"], entry)
    variables = entrant.systems[0].variables
    if knowledge == "nothing":
        assert "NETSTORM_NETWORK" not in variables
        return
    told = load_network(variables["NETSTORM_NETWORK"])
    assert told.changes == ()
    assert told.linked_pairs() == network.linked_pairs()
    assert len({(link.rate, link.latency) for link in told.links}) == (1 if knowledge == "links" else 14)


def test_the_best_hub_of_a_course_is_the_fastest_over_all_of_it(bench):
    # Rank 0's link is the faster one at first, and most of the time the slower one.
    row = [(Rank(0), Rank(1)), (Rank(1), Rank(2))]
    both = [(a, b) for a, b in row] + [(b, a) for a, b in row]
    rates = {0: 40e6, 1: 10e6}

    def network(*changes):
        return Network(
            nodes=tuple(Node(rank=Rank(rank)) for rank in range(3)),
            links=tuple(Link(source=a, target=b, rate=rates[min(a, b)]) for a, b in both),
            changes=tuple(
                Change(at=at, source=a, target=b, rate=rate)
                for at, pair, rate in changes
                for a, b in both
                if (min(a, b), max(a, b)) == pair
            ),
        )

    later = [(at, link, rate) for at in (10, 20) for link, rate in (((0, 1), 40e6), ((1, 2), 160e6))]
    first = bench.entrants.hubs_by_time(network(), 1e6)
    whole = bench.entrants.hubs_by_time(network(*later), 1e6)
    assert first.index(0) < first.index(2)
    assert whole.index(2) < whole.index(0)

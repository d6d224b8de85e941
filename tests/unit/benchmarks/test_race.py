"""The race's arithmetic and entrants, without any process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.errors import UsageError
from netstorm.topology.files import load_network
from netstorm.topology.network import Link, Network, Node, Rank

ROOT = Path(__file__).parents[3]


@pytest.fixture
def race(monkeypatch):
    """The benchmarks' own modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = (
        "systems.entrants",
        "systems.base",
        "race.options",
        "race.results",
        "harness.results",
    )
    modules = {name.removeprefix("systems."): importlib.import_module(name) for name in names}
    return SimpleNamespace(**{name.replace(".", "_"): module for name, module in modules.items()})


def line(rates):
    """Return nodes in a row, with equal links both ways between neighbours."""
    pairs = [(place, place + 1) for place in range(len(rates))]
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(len(rates) + 1)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=rate, latency=0.01)
            for (source, target), rate in zip(pairs, rates, strict=True)
            for a, b in ((source, target), (target, source))
        ),
    )


def test_hubs_are_ordered_by_what_a_star_over_the_routes_takes(race):
    # All rows but the hub's pass the link next to it: from an end that is four of them, from the middle two.
    order = race.entrants.hubs_by_time(line([1e6, 1e6, 1e6, 1e6]), 1e6)
    assert order[0] == 2
    assert set(order[-2:]) == {0, 4}


def entry(race, tmp_path, network, **more):
    return race.entrants.Entry(network=network, folder=tmp_path, bytes=1_000_000, **more)


def test_the_average_star_is_several_hubs_that_a_seed_chooses(race, tmp_path):
    network = load_network(ROOT / "examples" / "networks" / "internet2.yaml")

    def hubs(seed):
        [entrant] = race.entrants.enter(["mxnet-star-mean"], entry(race, tmp_path, network, seed=seed))
        return [system.hub for system in entrant.systems]

    assert len(set(hubs(1))) == 3
    assert hubs(1) == hubs(1)
    assert len({tuple(hubs(seed)) for seed in range(10)}) > 1


def test_every_name_enters_or_says_why_not(race, tmp_path):
    network = load_network(ROOT / "examples" / "networks" / "internet2.yaml")
    entrants = race.entrants.enter(race.entrants.NAMES, entry(race, tmp_path, network))
    assert [one.name for one in entrants] == list(race.entrants.NAMES)
    assert all(bool(one.systems) != bool(one.why_not) for one in entrants)


def test_the_papers_stages_differ_in_awareness_and_auxiliary_paths_alone(race, tmp_path):
    names = ["netstorm-lite", "netstorm-std", "netstorm-pro"]
    found = [
        one.systems[0].variables for one in race.entrants.enter(names, entry(race, tmp_path, line([1e6])))
    ]
    switches = [(one["ENABLE_AWARENESS"], one["ENABLE_AUX_PATH"]) for one in found]
    assert switches == [("0", "0"), ("1", "0"), ("1", "1")]
    assert {one["NETSTORM_TOPOLOGY"] for one in found} == {"fapt"}


def test_the_papers_own_stages_have_its_preset(race, tmp_path):
    names = [f"netstorm-paper-{stage}" for stage in ("lite", "std", "pro")]
    found = [
        one.systems[0].variables for one in race.entrants.enter(names, entry(race, tmp_path, line([1e6])))
    ]
    assert [one["ENABLE_AWARENESS"] + one["ENABLE_AUX_PATH"] for one in found] == ["00", "10", "11"]
    assert {one["NETSTORM_PRESET"] for one in found} == {"paper"}


def test_a_scheme_that_the_overlay_does_not_allow_runs_over_the_routes(race, tmp_path):
    network = line([1e6, 1e6])
    race.entrants.enter(["netstorm-ring", "netstorm-fapt"], entry(race, tmp_path, network))
    assert load_network(tmp_path / "netstorm-ring.yaml").routing.value == "underlay"
    assert load_network(tmp_path / "netstorm-fapt.yaml") == network


def test_settings_behind_a_name_are_that_systems_alone(race, tmp_path):
    names = ["netstorm-fapt", "netstorm-fapt@CHUNK_SIZE=1000"]
    plain, changed = race.entrants.enter(names, entry(race, tmp_path, line([1e6])))
    assert changed.systems[0].variables["CHUNK_SIZE"] == "1000"
    assert "CHUNK_SIZE" not in plain.systems[0].variables


def test_a_setting_without_a_value_is_not_set(race, tmp_path):
    names = ["netstorm-auto", "netstorm-auto@NETSTORM_NETWORK="]
    told, untold = race.entrants.enter(names, entry(race, tmp_path, line([1e6])))
    assert told.systems[0].variables["NETSTORM_NETWORK"].endswith(".yaml")
    assert untold.systems[0].variables["NETSTORM_NETWORK"] == ""


@pytest.mark.parametrize(
    "name", ["nonsuch", "netstorm-custom", "gloo@CHUNK_SIZE=1", "netstorm-fapt@CHUNK_SIZE"]
)
def test_a_wrong_name_is_refused_and_quoted(race, tmp_path, name):
    with pytest.raises(UsageError, match=name.split("@")[0]):
        race.entrants.enter([name], entry(race, tmp_path, line([1e6])))


def row(race, name, *times, why_not="", error=None):
    case = race.base.Case(nodes=2, bytes=1_000_000)
    parts = {}
    for place, rounds in enumerate(times):
        system = SimpleNamespace(name=f"{name} {place}", settings={"a": "b"})
        parts[system.name] = race.harness_results.Row(
            system=system, case=case, rounds_s=list(rounds), error=error,
            link_bytes=[{"0→1": 10 + place}] * len(rounds),
        )  # fmt: skip
    entrant = race.entrants.Entrant(
        name=name, systems=tuple(part.system for part in parts.values()), why_not=why_not
    )
    return race.race_results.RaceRow(
        entrant=entrant, case=case, optimum_s=0.5, bound_s=0.6, goodput=0.8, parts=parts
    )


def results(race, *rows):
    network = {
        "file": "n.yaml", "nodes": 2, "rates_scale": 1.0, "loss": "0%", "backend": "b", "congestion": "c",
        "goodput": 0.8,
    }  # fmt: skip
    return race.race_results.RaceResults(network=network, machine={}, options={}, rows=list(rows))


def test_ratios_are_times_over_this_systems_median(race):
    content = results(
        race,
        row(race, "mxnet-star-best", [4.0, 6.0, 5.0]),
        row(race, "mxnet-star-mean", [10.0, 10.0], [20.0, 22.0], [30.0, 31.0]),
        row(race, "mxnet-sharded", [8.0]),
        row(race, "netstorm-packing", [1.0, 1.0, 9.0]),
    ).as_json()["results"]
    best, mean, _, packing = content
    assert mean["rounds_s"] == [20.0, 21.0]
    assert mean["median_s"] == 20.5
    assert len(mean["parts"]) == 3
    assert (best["median_s"], best["of_optimum"]) == (5.0, 0.1)
    assert packing["of_goodput_optimum"] == pytest.approx(0.625)
    assert [packing[name] for name in ("vs_star_best", "vs_star_mean", "vs_sharded")] == [5.0, 20.5, 8.0]
    assert mean["bytes_per_link"] == {"0→1": 11}


def test_a_system_that_failed_or_cannot_run_is_a_row_that_says_so(race):
    content = results(
        race,
        row(race, "gloo", [], error="gloo worker 3 took longer than 5 s"),
        row(race, "openmpi", why_not="no mpirun"),
    ).as_json()["results"]
    assert [one["error"] for one in content] == ["gloo worker 3 took longer than 5 s", "no mpirun"]
    assert [one["median_s"] for one in content] == [None, None]
    assert [one["vs_star_best"] for one in content] == [None, None]


def test_what_is_written_is_complete_json_and_nothing_else_is_left(race, tmp_path):
    path = tmp_path / "out.json"
    found = results(race, row(race, "netstorm-fapt", [1.0]))
    found.save(path)
    found.save(path)
    assert json.loads(path.read_text())["results"][0]["system"] == "netstorm-fapt"
    assert [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_the_table_has_every_row_and_every_reason(race, tmp_path):
    from rich.console import Console

    path = tmp_path / "table.txt"
    found = results(race, row(race, "netstorm-fapt", [1.0]), row(race, "openmpi", why_not="no mpirun"))
    with path.open("w") as file:
        found.show(Console(file=file, width=150))
    text = path.read_text()
    assert "netstorm-fapt" in text
    assert "openmpi: no mpirun" in text


def test_the_folder_of_logs_is_made(race, tmp_path, capsys):
    network = str(ROOT / "examples" / "networks" / "pair.yaml")
    for _ in range(2):
        options = race.race_options.race_options([network, "--logs", str(tmp_path / "logs")])
        assert options.logs.is_dir()
    (tmp_path / "file").touch()
    for where, why in (("file", "File exists"), ("no/logs", "No such file or directory")):
        with pytest.raises(SystemExit):
            race.race_options.race_options([network, "--logs", str(tmp_path / where)])
        assert f"{where}' is no folder, and cannot become one: {why}" in capsys.readouterr().err

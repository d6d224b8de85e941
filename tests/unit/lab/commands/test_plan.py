"""`netstorm plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.topology import SCHEMES, Network, Rank, dump_network, form_policy, load_network
from netstorm.topology.files import tensors_of
from netstorm.topology.lower_bound import PART_HEADER_BYTES
from netstorm.topology.resources import optimum
from netstorm.topology.tree import Tree

# --------------------------------------------------------------------------------------------------- command
# `netstorm plan`: what it prints, in both forms, and what it says of wrong arguments.


INTERNET2 = "examples/networks/internet2.yaml"


def run(*arguments: str):
    return CliRunner().invoke(
        app, ["plan", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"}, prog_name="netstorm"
    )


def planned(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def written(network: Network, path: Path) -> str:
    path.write_text(dump_network(network), encoding="utf-8")
    return str(path)


def test_json_compares_every_scheme_with_the_optimum_and_chooses_the_fastest():
    found = planned(INTERNET2, "--model", "8MB")

    assert found["bytes"] == 8_000_000
    assert found["optimum_s"] == pytest.approx(optimum(load_network(INTERNET2), 8e6).seconds)
    schemes = found["schemes"]
    assert {*schemes, *found["not_applicable"]} == SCHEMES.keys() - {"custom"}
    for scheme in schemes.values():
        assert scheme["of_optimum"] == pytest.approx(found["optimum_s"] / scheme["fluid_s"])
        assert scheme["of_optimum"] <= 1.001  # the linear program ends within a small gap of its solution
        assert scheme["over_star"] == pytest.approx(schemes["star"]["predicted_s"] / scheme["predicted_s"])
    fastest = min(scheme["predicted_s"] for scheme in schemes.values())
    assert schemes[found["chosen"]]["predicted_s"] == fastest


def test_a_hub_of_two_nodes_takes_what_arithmetic_says(tmp_path: Path):
    pair = written(Network.uniform(2, rate=80e6, latency=0.1), tmp_path / "pair.yaml")

    found = planned(pair, "--model", "10MB", "--topology", "star", "--chunk", "1MB")

    star = found["schemes"]["star"]
    assert star["fluid_s"] == pytest.approx(1.0)  # 80 Mbit each way at 80 Mbit/s, at once
    assert star["predicted_s"] == pytest.approx(
        0.1 + 0.1 + 1.0 + 0.1, rel=1e-4
    )  # the last chunk up, and then down
    assert star["link_bytes"] == dict.fromkeys(("0→1", "1→0"), 10_000_000 + 10 * PART_HEADER_BYTES)


def test_one_scheme_is_compared_with_the_parameter_servers_of_today():
    found = planned(INTERNET2, "--model", "1MB", "--topology", "mst")
    assert set(found["schemes"]) == {"star", "sharded", "mst"}
    assert found["chosen"] == "mst"


def test_auto_is_planned_as_a_job_would_run_it():
    found = planned(INTERNET2, "--model", "20MB", "--topology", "auto")
    assert set(found["schemes"]) == {"star", "sharded", "auto"}
    assert found["chosen"] == "auto"
    assert found["reason"]


def test_json_gives_trees_that_are_trees_and_shares_that_are_one():
    found = planned(INTERNET2, "--model", "1MB", "--topology", "fapt", "--roots", "3")
    trees = [
        Tree(
            root=tree["root"],
            reduce_parent=tuple(tree["reduce_parent"]),
            broadcast_parent=tuple(tree["broadcast_parent"]),
        )
        for tree in found["trees"]
    ]
    assert {tree.root for tree in trees} == {
        tree.root for tree in form_policy(load_network(INTERNET2), "fapt", num_roots=3).trees
    }
    assert sum(tree["share"] for tree in found["trees"]) == pytest.approx(1.0)


def test_the_text_names_the_chosen_scheme_the_links_and_the_trees():
    result = run(INTERNET2, "--model", "resnet50", "--topology", "fapt", "--chunk", "1MB")
    assert result.exit_code == 0
    assert "102.2MB in 161 tensors, in chunks of 1MB, among 9 nodes" in result.stdout
    assert "chosen: fapt" in result.stdout
    assert "└── " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert result.stderr == ""


def test_a_scheme_that_does_not_apply_is_said_to_among_all_and_is_an_error_alone():
    found = planned(INTERNET2, "--model", "1MB")
    assert "links that this overlay has not" in found["not_applicable"]["ring"]

    alone = run(INTERNET2, "--model", "1MB", "--topology", "ring")
    assert alone.exit_code == 2
    assert found["not_applicable"]["ring"] in alone.stderr


def test_access_caps_are_listed_as_links_are():
    found = planned("examples/networks/cloud.yaml", "--model", "1MB", "--topology", "star", "--hub", "5")
    sent = found["schemes"]["star"]["link_bytes"]
    assert sent["ingress of rank 5"] == sent["egress of rank 5"] == 5 * (1_000_000 + 4 * PART_HEADER_BYTES)
    text = run("examples/networks/cloud.yaml", "--model", "1MB", "--topology", "star", "--hub", "5").stdout
    assert "egress of rank 5" in text


@pytest.mark.parametrize("size", [1, 12])
def test_networks_of_one_node_and_of_more_than_a_matrix_shows_are_planned_too(tmp_path: Path, size):
    result = run(written(Network.uniform(size), tmp_path / "n.yaml"), "--model", "1MB", "--topology", "star")
    assert result.exit_code == 0, result.stderr
    assert "chosen: star" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "nonsuch"], "netstorm: topology 'nonsuch': expected all, auto, "),
        (["--topology", "custom"], "netstorm: topology 'custom' needs its trees: expected --custom FILE"),
        (["--model", "vgg"], "netstorm: model 'vgg': expected alexnet, resnet50, a size such as 244MB"),
        (["--chunk", "1"], "netstorm: '1' has no unit"),
        (["--chunk", "0MB"], "expected at least 1"),
        (["--hub", "99"], "hub 99: expected a rank from 0 to 8"),
        (["--plot", "plan.txt"], "--plot plan.txt: expected a name that ends in .png, .svg, .pdf"),
        (["--plot", "nowhere/plan.png"], "--plot nowhere/plan.png: there is no folder nowhere"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, message):
    result = run(INTERNET2, "--model", "1MB", "--topology", "star", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_named():
    result = run("nowhere.yaml", "--model", "1MB")
    assert result.exit_code == 2
    assert result.stderr.startswith("netstorm: nowhere.yaml: the network file cannot be read")


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delitem(sys.modules, "netstorm.lab.commands.plan_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(INTERNET2, "--model", "1MB", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    assert "pip install 'netstorm[plot]'" in result.stderr


@pytest.mark.parametrize("path", sorted(Path("examples/networks").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_network_is_planned(path: Path):
    found = planned(str(path), "--model", "2MB", "--topology", "fapt")
    assert set(found["schemes"]) == {"star", "sharded", "fapt"}
    assert found["schemes"]["fapt"]["predicted_s"] > found["optimum_s"]


def test_a_plan_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    planned(INTERNET2, "--model", "2MB", "--topology", "fapt", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nodes_are_drawn_apart_even_in_one_city():
    from netstorm.lab.commands.plan_plot import places
    from netstorm.topology import Node

    mesh = Network.uniform(6)
    crowd = Network(nodes=tuple(Node(rank=Rank(rank), site="paris") for rank in range(6)), links=mesh.links)
    where = list(places(crowd).values())
    distances = [abs(complex(*a) - complex(*b)) for a in where for b in where if a is not b]
    assert min(distances) > 0.1


def test_models_have_the_size_that_papers_quote():
    assert [round(sum(tensors_of(model)) / 1e6) for model in ("alexnet", "resnet50")] == [244, 102]


# ---------------------------------------------------------------------------------------------------- codecs
# Which compression `netstorm plan --compute` names.


FILE = Path(__file__).parents[4] / "examples/networks/four_sites.yaml"


@pytest.mark.parametrize(
    ("seconds", "codec"), [(100, "none"), (17, "fp16"), (11, "int8"), (0.5, "powersgd rank=16")]
)
def test_the_mildest_codec_that_keeps_up_with_a_steps_computation_is_named(
    seconds: float, codec: str
) -> None:
    arguments = ["plan", str(FILE), "--topology", "fapt", "--compute", str(seconds)]
    said = CliRunner().invoke(app, arguments)
    assert f"compression: {codec} " in said.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["codecs"]
    assert found["chosen"] == codec
    times = list(found["times_s"].values())
    assert times == sorted(times, reverse=True)


@pytest.fixture
def priced(tmp_path: Path) -> str:
    """Of a triangle one link is fast and dear: the fastest policy uses it, the cheapest does not."""
    path = tmp_path / "priced.yaml"
    path.write_text(
        "nodes: {0: {}, 1: {}, 2: {}}\nlinks:\n"
        "  - {between: [0, 1], rate: 100Mbit, price: 1/GB}\n"
        "  - {between: [0, 2], rate: 10Mbit, price: 0.01/GB}\n"
        "  - {between: [1, 2], rate: 10Mbit, price: 0.01/GB}\n"
    )
    return str(path)


def test_costs_follow_from_prices_and_decide_if_asked_to(priced: str):
    by_time = planned(priced, "--model", "10MB")
    by_money = planned(priced, "--model", "10MB", "--objective", "money")
    assert by_money["schemes"]["cheapest"]["cost"] == pytest.approx(4 * 0.01 * 0.01, rel=1e-3)
    assert by_money["schemes"][by_money["chosen"]]["cost"] == pytest.approx(4 * 0.01 * 0.01, rel=1e-3)
    assert by_time["schemes"][by_time["chosen"]]["cost"] > 0.005
    assert by_time["front"] == by_money["front"]
    assert by_time["front"][0] == by_time["chosen"]
    shown = run(priced, "--model", "10MB")
    assert "none is both faster and cheaper than" in shown.stdout


@pytest.mark.parametrize(
    ("file", "for_a_gb"),
    [
        # To one of the three regions that ask for 0.02: both ends' prices, for each of the five others.
        ("aws_regions", 2 * 0.04 + 0.11 + 0.118 + 0.158),
        # Amazon's two, Azure and Oregon, Azure and Virginia.
        ("three_clouds", (0.02 + 0.09) + (0.09 + 0.0875) + (0.12 + 0.0875)),
    ],
)
def test_published_prices_decide(file: str, for_a_gb: float):
    found = planned(f"examples/networks/{file}.yaml", "--model", "50MB", "--objective", "money")
    assert found["schemes"]["cheapest"]["cost"] == pytest.approx(for_a_gb / 20, rel=1e-3)  # and headers
    assert found["schemes"][found["chosen"]]["cost"] == pytest.approx(for_a_gb / 20, rel=1e-3)  # and headers
    assert found["schemes"]["sharded"]["predicted_s"] < found["schemes"]["cheapest"]["predicted_s"]
    assert found["schemes"]["sharded"]["cost"] > 1.1 * found["schemes"]["cheapest"]["cost"]


def test_both_ends_of_the_front_are_shown_and_drawn_if_both_are_to_decide(priced: str, tmp_path: Path):
    arguments = (priced, "--model", "10MB", "--objective")
    by_time, by_money, both = (planned(*arguments, word) for word in ("time", "money", "both"))
    assert by_time["chosen"] != by_money["chosen"]
    assert [both["chosen"], both["trees"]] == [by_time["chosen"], by_time["trees"]]
    assert both["cheapest"] == {name: by_money[name] for name in ("chosen", "reason", "trees")}
    assert by_time["cheapest"] is by_money["cheapest"] is None
    shown = run(*arguments, "both", "--plot", str(tmp_path / "both.svg")).stdout
    assert f"fastest: {by_time['chosen']} (" in shown
    assert f"cheapest: {by_money['chosen']} (" in shown
    longer = by_money["schemes"][by_money["chosen"]]["predicted_s"]
    longer /= by_time["schemes"][by_time["chosen"]]["predicted_s"]
    assert f"the cheapest takes {longer:.2f} " in shown
    assert shown.count("MB from (rows) to (columns)") == 2
    (drawn,) = tmp_path.glob("*.svg")
    assert f"<!-- {by_money['chosen']}: what its tree sends over each link -->" in drawn.read_text()


def test_a_scheme_that_is_both_fastest_and_cheapest_is_shown_once(tmp_path: Path):
    path = tmp_path / "pair.yaml"
    path.write_text("nodes: {0: {}, 1: {}}\nlinks: [{between: [0, 1], rate: 10Mbit, price: 1/GB}]\n")
    found = planned(str(path), "--model", "10MB", "--objective", "both")
    assert found["front"] == [found["chosen"]]
    assert found["cheapest"] is None
    shown = run(str(path), "--model", "10MB", "--objective", "both").stdout
    assert f"chosen: {found['chosen']} (" in shown


@pytest.mark.parametrize("objective", ["both", "money", "fame"])
def test_an_objective_that_is_none_or_needs_prices_is_named(objective: str):
    done = run(INTERNET2, "--objective", objective)
    assert done.exit_code == 2
    assert f"--objective {objective}: " in done.stderr

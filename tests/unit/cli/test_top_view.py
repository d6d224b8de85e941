"""What `netstorm top` shows of a status."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from netstorm.cli.top_view import view
from netstorm.protocol import messages as m
from netstorm.scheduler.bound import Bound
from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.status import TreeStatus
from netstorm.topology.files import parse_network
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree
from tests.unit.scheduler.driving import Driven, running, star


def shown(driven, width=120, **changed):
    """Return the lines that a terminal of this width would show; `changed`: fields of the snapshot."""
    snapshot = replace(driven.machine.snapshot(driven.now), **changed)
    status = build_status(snapshot, time=0.0, scheduler="h:1", http="h:2")
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(view(status, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def line_with(lines, text):
    (found,) = [line for line in lines if text in line]
    return found


def report(**changed):
    values = {
        "rounds": 99,
        "round_s": 1.25,
        "waited_s": 10.0,
        "bytes_sent": 5_000_000,
        "clock_offset": 0.05,
        "clock_drift": 0.0,
        "last_round": 41,
        "clock_error": 0.001,
    }
    return m.NodeStatus(**{**values, **changed})


def test_a_node_s_line_has_its_times_and_what_it_waits_for():
    driven = running(3)
    driven.say(1, report())
    driven.now += 2.0
    driven.say(1, report(waited_s=11.0, bytes_sent=7_500_000))
    driven.say(1, m.Heartbeat(busy="round 42 of key 'w': 3 of 9 chunks wait for contributions of ranks [2]"))
    line = line_with(shown(driven, 160), "site1 ")
    words = line.split()
    assert words[:9] == ["1", "n1:4000", "site1", "0.0s", "41", "1.25s", "50%", "10Mbit/s", "7.5MB"]
    assert words[9] == "+50.00ms"
    assert "contributions of ranks [2]" in line


def test_what_traffic_costs_an_hour_is_told_if_the_network_file_has_prices():
    driven = running(2)
    driven.say(1, report())
    driven.now += 2.0
    driven.say(1, report(bytes_sent=7_500_000))  # 4.5 GB an hour
    links = "links: [{between: [0, 1], rate: 9Mbit}]"
    dear = parse_network(f"nodes: {{0: {{}}, 1: {{price: 2/GB}}}}\n{links}", "file")
    assert ", traffic costs 9 an hour" in shown(driven, 160, planned=dear)[0]
    assert (
        "costs"
        not in shown(driven, 160, planned=parse_network(f"nodes: {{0: {{}}, 1: {{}}}}\n{links}", "file"))[0]
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_cuts_no_number_and_has_what_ranks_wait_for_on_lines_of_their_own(width):
    driven = running(3)
    for rank in range(3):
        driven.say(rank, report())
    wait = "round 42 of key 'w': 3 of 9 chunks wait for contributions of ranks [2]"
    driven.say(1, m.Heartbeat(busy=wait))
    lines = shown(driven, width)
    heading, *rows = lines[lines.index(line_with(lines, "rank  ")) :][:4]
    assert "waits for" not in heading
    for rank, row in enumerate(rows):
        cells = dict(zip(heading.split(), row.split(), strict=True))
        assert (cells["rank"], cells["round"], cells["took"]) == (str(rank), "41", "1.25s")
    assert wait in " ".join(" ".join(lines).split())
    assert "…" not in "".join(rows)


def test_trees_are_shown_as_brackets_and_both_ways_where_they_differ():
    driven = running(4)
    chain = Tree(root=Rank(0), reduce_parent=(-1, 0, 1, 1), broadcast_parent=(-1, 2, 0, 0))
    both = Policy(
        version=2, trees=(chain, Tree.undirected(Rank(3), (3, 3, 3, -1))), weights=(3, 1), reason="why"
    )
    driven.install(both)
    lines = shown(driven)
    assert line_with(lines, "75.0%").split(None, 1)[1] == "0(1(2 3))   and down again 0(2(1) 3)"
    assert line_with(lines, "25.0%").split(None, 1)[1] == "3(0 1 2)"
    assert line_with(lines, "policy 2").endswith(": why")
    assert any(line.startswith("   1  ended 0.0s ago") for line in lines)


@pytest.mark.parametrize(
    ("root", "parents"),
    [
        (0, (-1, 16, 0)),
        (3, (-1, 0, 0)),
        (-1, (-1, 0, 0)),
        (0, (1, 0, 0)),
        (0, (-1, 0)),
        (0, ()),
    ],
    ids=["a parent that is not there", "nor its root", "a root below 0", "a loop", "too short", "empty"],
)
def test_what_is_no_tree_is_no_status_whoever_has_sent_it(root, parents):
    sent = {"root": root, "share": 1.0, "reduce_parent": (-1, 0, 0), "broadcast_parent": parents}
    with pytest.raises(msgspec.ValidationError, match="no tree of 3 ranks"):
        msgspec.json.decode(msgspec.json.encode(sent), type=TreeStatus)


def test_a_tree_of_any_depth_is_shown():
    driven = running(2)
    status = build_status(driven.machine.snapshot(driven.now), time=0.0, scheduler="h:1", http="h:2")
    chain = tuple(range(-1, 2000))
    tree = TreeStatus(root=0, share=1.0, reduce_parent=chain, broadcast_parent=chain)
    policy = msgspec.structs.replace(status.policy, trees=(tree,))
    console = Console(width=2000, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(view(msgspec.structs.replace(status, policy=policy), 2000))
    assert "(99(100(…)))" in capture.get()


def test_the_matrix_has_a_measured_link_in_the_row_of_its_source():
    driven = running(3, measures=True)
    driven.say(2, m.Measured(links=(m.LinkMeasure(source=0, rate=5e7, error=0.1),), ingress=9e7))
    lines = shown(driven)
    assert line_with(lines, "0 site0").split() == ["0", "site0", "·", "·", "50", "·", "·"]
    assert line_with(lines, "2 site2").split()[-1] == "90"


def test_pairs_whose_ways_lead_past_other_nodes_are_marked():
    driven = running(3)
    driven.say(2, m.Measured(links=(m.LinkMeasure(source=1, rate=5e7, error=0.1),)))
    lines = shown(driven, routed=frozenset({(0, 2), (2, 0)}))
    assert line_with(lines, "0 site0").split() == ["0", "site0", "·", "·", "~", "·", "·"]
    assert "; ~: 2 pairs that are routed past other nodes" in " ".join(lines)
    narrow = shown(driven, 40, routed=frozenset({(0, 2), (2, 0)}))
    assert "measured, beside 2 pairs that are routed past other nodes" in " ".join(narrow)
    assert "~" not in "".join(shown(driven))


@pytest.mark.parametrize("width", [40, 120])
def test_it_says_where_links_carry_less_in_company(width):
    driven = running(3)
    driven.say(2, m.Measured(links=(m.LinkMeasure(source=1, rate=5e7, error=0.1),)))
    assert "links carry less under contention" in " ".join(shown(driven, width, contended=True))
    assert "company" not in " ".join(shown(driven, width))


def test_where_a_matrix_does_not_fit_the_slowest_links_are_listed():
    driven = running(30)
    for rate, source in ((3e6, 4), (2e8, 5)):
        driven.say(9, m.Measured(links=(m.LinkMeasure(source=source, rate=rate, error=0.1),)))
    assert "4>9 3  5>9 200" in shown(driven)


def test_auxiliary_paths_are_shown():
    driven = running(3)
    detour = Detour(path=(1, 2, 0), links=((1e7, 0.01), (1e7, 0.01)), explore=True)
    driven.install(msgspec.structs.replace(star(3, version=2), detours=(detour,)))
    driven.say(1, report(detoured=5))
    line = line_with(shown(driven), "auxiliary")
    assert line == "1 auxiliary paths, 1 of them to explore; 5 chunks so far:  1>2>0"


def test_while_nodes_come_it_says_who_is_missing():
    driven = Driven(3)
    driven.join("n0", 1)
    lines = shown(driven)
    assert "gathering  1 of 3 nodes" in lines[0]
    assert "waiting for 2 of 3 nodes" in lines[1]


def test_why_a_job_has_failed_is_said():
    driven = running(2)
    driven.say(1, m.Failed(reason="out of memory"))
    assert any("out of memory" in line for line in shown(driven))


def test_what_nodes_say_is_text_whatever_it_looks_like():
    driven = running(2)
    driven.say(0, m.Heartbeat(busy="[bold red]x[/] [link=http://evil]y[/link]"))
    assert line_with(shown(driven, 200), "site0 ").endswith("[bold red]x[/] [link=http://evil]y[/link]")


@pytest.mark.parametrize("width", [20, 40, 80, 300])
@pytest.mark.parametrize("ranks", [1, 9, 50])
def test_any_width_will_do(width, ranks):
    driven = running(ranks)
    driven.say(0, report())
    assert all(len(line) <= width for line in shown(driven, width))


def test_a_busy_node_is_shown_as_such():
    driven = running(2, heartbeat_timeout_s=10.0)
    driven.busy = {1}
    driven.run(25, beating=(0,))
    assert "alive, but its Python has not run for 25s" in line_with(shown(driven, 160), "site1 ")


def test_the_bound_of_a_round_is_a_line_of_its_own():
    driven = running(3)
    snapshot = driven.machine.snapshot(driven.now)
    status = build_status(snapshot, time=0.0, scheduler="h:1", http="h:2")
    bound = Bound(seconds=1.5, reason="everything must pass", assumed=0, links=6, took_s=2.0)
    console = Console(width=120, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(view(status, 120, bound))
    line = line_with(capture.get().splitlines(), "bound ")
    assert line.strip() == (
        "bound no round takes less than 1.5 s: everything must pass; the last one took 2 s, 75% of it"
    )

"""Files that users write: networks and tensor sizes; what they say, and what is said about wrong ones."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import NetworkFileError, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import (
    Change,
    Link,
    Network,
    Node,
    Rank,
    Routing,
    dump_network,
    load_network,
    parse_network,
)
from netstorm.topology.files import alexnet_shapes, resnet50_shapes, tensors_of

# ------------------------------------------------------------------------------------------------------ file
# Network files: what they say, and what is said about those that are wrong.


EXAMPLES = sorted(Path("examples/networks").glob("*.yaml"))

GOOD = """\
nodes: {0: {site: seattle, egress: 600Mbit, ingress: 500Mbit}, 1: {site: denver}, 2: {}}   # optional caps
links:                                        # undirected unless `from`/`to`; numbers per direction
  - {between: [0, 1], rate: 100Mbit, latency: 15ms, loss: 0.02%}
  - {from: 1, to: 2, rate: 20Mbit, latency: 30ms}
  - {from: 2, to: 1, rate: 5Mbit}
routing: underlay
changes:
  - {at: 3min, between: [0, 1], rate: 40Mbit}
  - {at: 90s, from: 2, to: 1, latency: 1s, loss: 1%}
"""


def test_a_network_file_says_what_its_format_promises():
    zero, one, two = Rank(0), Rank(1), Rank(2)

    assert parse_network(GOOD) == Network(
        nodes=(
            Node(rank=zero, site="seattle", egress=600e6, ingress=500e6),
            Node(rank=one, site="denver"),
            Node(rank=two),
        ),
        links=(
            Link(source=zero, target=one, rate=100e6, latency=0.015, loss=0.0002),
            Link(source=one, target=zero, rate=100e6, latency=0.015, loss=0.0002),
            Link(source=one, target=two, rate=20e6, latency=0.03),
            Link(source=two, target=one, rate=5e6),
        ),
        routing=Routing.UNDERLAY,
        changes=(
            Change(at=90, source=two, target=one, latency=1.0, loss=0.01),
            Change(at=180, source=zero, target=one, rate=40e6),
            Change(at=180, source=one, target=zero, rate=40e6),
        ),
    )


def test_only_linked_pairs_talk_unless_the_file_says_otherwise():
    assert parse_network("nodes: {0: {}}").routing is Routing.OVERLAY


@pytest.mark.parametrize("text", ["nodes: {0: {}}", "nodes: {0: }\nlinks: []\nchanges: []", "nodes:\n  0:\n"])
def test_one_node_needs_no_links(text: str):
    assert parse_network(text) == Network(nodes=(Node(rank=Rank(0)),), links=())


@given(networks(symmetric=None, capped=True, changing=True, routing=None))
def test_a_network_that_is_written_and_read_is_the_same(network: Network):
    assert parse_network(dump_network(network)) == network


@given(
    st.floats(1, 1e15),
    st.floats(1e-90, 3600) | st.just(0.0),
    st.floats(1e-90, 1, exclude_max=True) | st.just(0.0),
    st.floats(0.001, 1e9),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
def test_numbers_and_names_are_written_exactly(
    rate: float, latency: float, loss: float, at: float, site: str
):
    site = "".join(c for c in site if c.isprintable() and not c.isspace() and c not in ",;/")
    network = Network(
        nodes=(Node(rank=Rank(0), site=site), Node(rank=Rank(1))),
        links=(
            Link(source=Rank(0), target=Rank(1), rate=rate, latency=latency, loss=loss),
            Link(source=Rank(1), target=Rank(0), rate=1e6),
        ),
        changes=(Change(at=at, source=Rank(0), target=Rank(1), rate=rate),),
    )

    assert parse_network(dump_network(network)) == network


def test_a_link_costs_what_it_says_or_what_its_source_says():
    text = "nodes: {0: {price: 0.09/GB}, 1: {}}\nlinks: [{between: [0, 1], rate: 1Mbit}]\n"
    assert [link.price for link in parse_network(text).links] == [0.09, 0.0]
    assert parse_network(dump_network(parse_network(text))) == parse_network(text)
    text = text.replace("rate: 1Mbit", "rate: 1Mbit, price: 0/GB")
    assert [link.price for link in parse_network(text).links] == [0.0, 0.0]


@pytest.mark.parametrize("price", ["0.09", "0.09/GiB", "-1/GB", "1e3/GB", "9999999/GB", "[]"])
def test_a_price_that_is_none_is_named(price: str):
    text = f"nodes: {{0: {{}}, 1: {{}}}}\nlinks:\n  - {{between: [0, 1], rate: 1Mbit, price: {price}}}\n"
    with pytest.raises(NetworkFileError, match=r"network:3: price of link 1.*0\.09/GB"):
        parse_network(text)


@pytest.mark.parametrize(
    "site", ["null", "NULL", "~", "1", "yes", '"', "a\\b", "-", "{x}", "#a", "a:", "Zürich"]
)
def test_a_site_whose_name_means_something_to_yaml_keeps_it(site: str):
    network = Network(nodes=(Node(rank=Rank(0), site=site),), links=())

    assert parse_network(dump_network(network)) == network


def test_changes_at_one_time_that_differ_by_direction_are_written_apart():
    network = Network.uniform(2)
    changes = (
        Change(at=1, source=Rank(0), target=Rank(1), rate=1e6),
        Change(at=1, source=Rank(1), target=Rank(0), rate=2e6),
        Change(at=2, source=Rank(0), target=Rank(1), loss=0.5),
        Change(at=2, source=Rank(1), target=Rank(0), loss=0.5),
    )

    text = dump_network(replace(network, changes=changes))

    assert parse_network(text).changes == changes
    assert text.splitlines()[-3:] == [
        "  - {at: 1s, from: 0, to: 1, rate: 1Mbit}",
        "  - {at: 1s, from: 1, to: 0, rate: 2Mbit}",
        "  - {at: 2s, between: [0, 1], loss: 50%}",
    ]


def test_what_is_written_is_what_a_person_would_write():
    network = Network.uniform(2, rate=100e6, latency=0.015)

    assert dump_network(network) == (
        "nodes:\n  0: {}\n  1: {}\nlinks:\n"
        "  - {between: [0, 1], rate: 100Mbit, latency: 15ms, loss: 0%}\nrouting: overlay\n"
    )


def test_where_nodes_are_is_read_and_written_exactly():
    network = parse_network(
        "nodes: {0: {lat: -33.9, lon: +151.2}, 1: {}}\nlinks: [{between: [0, 1], rate: 1Mbit}]"
    )
    assert [(node.lat, node.lon) for node in network.nodes] == [(-33.9, 151.2), (None, None)]
    assert parse_network(dump_network(network)) == network


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reads_and_survives_being_written(path: Path):
    network = load_network(path)

    assert parse_network(dump_network(network)) == network
    assert all(node.site for node in network.nodes)


def test_the_example_of_the_paper_has_the_papers_numbers():
    network = load_network("examples/networks/internet2.yaml")

    assert network.size == 9
    assert len(network.links) == 2 * 14
    assert {(link.latency, link.loss) for link in network.links} == {(0.03, 0.0002)}
    for time in (0, 180, 360, 540, 720):
        now = network.at(time)
        assert all(20e6 <= link.rate <= 155e6 for link in now.links)
        assert all(now.link(link.target, link.source).rate == link.rate for link in now.links)
    assert {change.at for change in network.changes} == {180, 360, 540, 720}


THREE = "nodes: {0: {}, 1: {}, 2: {}}\nlinks:\n"
LINKED = THREE + "  - {between: [0, 1], rate: 1Mbit}\n  - {between: [1, 2], rate: 1Mbit}\n"
UNITS = "a rate is a number and one of bit, kbit, Mbit, Gbit, Tbit"
NODE_KEYS = "site, egress, ingress, lat, lon, price"
LINK_KEYS = "between, from, to, rate, latency, loss, price"

WRONG = [
    ("", "1: empty: expected a mapping with nodes, links, routing, changes"),
    ("# nothing\n", "1: empty: expected a mapping with nodes, links, routing, changes"),
    ("a: b: c", "1: not YAML: mapping values are not allowed here"),
    ("nodes:\n  0: {\n", "3: not YAML: expected the node content, but found '<stream end>'"),
    ("nodes: {0: {}}\n---\nnodes: {0: {}}", "2: not YAML: but found another document"),
    ("nodes:\n 0: \x00", "2: not YAML: character 0: special characters are not allowed"),
    ('"\\U99999999"', "1: not YAML: an escaped character, or a number, that is out of range"),
    ("%YAML 1." + "9" * 5000, "1: not YAML: an escaped character, or a number, that is out of range"),
    ("[" * 5000, "1: not YAML that can be read: nested too deeply"),
    ("&a [*a]", "1: the file is a list: expected a mapping with nodes, links, routing, changes"),
    ("nine nodes", "1: the file is 'nine nodes': expected a mapping with nodes, links, routing, changes"),
    ("links: []", "1: the file has no nodes: expected nodes: {0: {}, 1: {}}"),
    (
        "nodes: {0: {}}\nrooting: overlay",
        (
            "2: unknown key 'rooting' in the file: expected nodes, links, routing, changes; "
            "did you mean 'routing'?"
        ),
    ),
    ("nodes: {0: {}}\nnodes: {0: {}}", "2: 'nodes' is given twice in the file; first in line 1"),
    ("nodes: {0: {}}\n? [a]\n: b", "2: a key of the file is a list: expected a word or a number"),
    (
        "nodes: !!python/object/apply:os.system [rm]",
        "1: nodes is a list: expected a mapping from rank to node, such as {0: {site: seattle}, 1: {}}",
    ),
    (
        "nodes:",
        "1: nodes is empty: expected a mapping from rank to node, such as {0: {site: seattle}, 1: {}}",
    ),
    ("nodes: {}", "1: no nodes: expected at least one, such as {0: {}}"),
    (
        "nodes:\n  0: {}\n  2: {}",
        "3: rank 2: expected ranks 0 to 1, since there are 2 nodes; rank 1 is missing",
    ),
    (
        "nodes: {0: {}, 4000000: {}}",
        "1: rank 4000000: expected ranks 0 to 1, since there are 2 nodes; rank 1 is missing",
    ),
    ("nodes:\n  0: {}\n  0: {}", "3: '0' is given twice in nodes; first in line 2"),
    ("nodes: {-1: {}}", "1: a key of nodes: '-1' is not a rank: expected a whole number from 0"),
    ("nodes: {1e3: {}}", "1: a key of nodes: '1e3' is not a rank: expected a whole number from 0"),
    (
        "nodes: {0: denver}",
        "1: rank 0 is 'denver': expected a mapping with site, egress, ingress, lat, lon, price",
    ),
    (
        "nodes: {0: {sites: denver}}",
        f"1: unknown key 'sites' in rank 0: expected {NODE_KEYS}; did you mean 'site'?",
    ),
    ("nodes: {0: {site: [a]}}", "1: site of rank 0 is a list: expected a name"),
    (
        "nodes: {0: {site: a/b}}",
        (
            "1: site of rank 0: site 'a/b': expected a name of at most 64 letters, "
            "without spaces, commas, ; and /"
        ),
    ),
    ("nodes: {0: {lat: 91, lon: 0}}", "1: lat of rank 0: '91': expected degrees north, from -90 to 90"),
    ("nodes: {0: {lat: 1, lon: 1e2}}", "1: lon of rank 0: '1e2': expected degrees east, from -180 to 180"),
    ("nodes: {0: {lat: 1}}", "1: rank 0 has one of lat and lon: expected both or neither"),
    (
        "nodes:\n  0:\n    egress: 100",
        f"3: egress of rank 0: '100' has no unit: {UNITS}, such as '100Mbit'",
    ),
    (
        "nodes: {0: {ingress: 0Mbit}}",
        "1: ingress of rank 0: '0Mbit' is out of range: expected more than 0: from 1bit/s to 1000Tbit/s",
    ),
    ("nodes: {0: {}, 1: {}}", "1: the file has no links: expected links: [{between: [0, 1], rate: 100Mbit}]"),
    (THREE, "2: links is empty: expected a list of links"),
    (THREE + "  0: {rate: 1Mbit}", "3: links is a mapping: expected a list of links"),
    (THREE + "  - 0-1", f"3: link 1 is '0-1': expected a mapping with {LINK_KEYS}"),
    (
        THREE + "  - between: [0, 1]\n    rte: 1Mbit",
        f"4: unknown key 'rte' in link 1: expected {LINK_KEYS}; did you mean 'rate'?",
    ),
    (
        THREE + "  - between: [0, 1]\n    rate: 1Mbit\n    rate: 2Mbit",
        "5: 'rate' is given twice in link 1; first in line 4",
    ),
    (THREE + "  - {between: [0, 1]}", "3: link 1 has no rate: expected rate: 100Mbit, for instance"),
    (
        THREE + "  - {between: [0, 1], rate: 100}",
        f"3: rate of link 1: '100' has no unit: {UNITS}, such as '100Mbit'",
    ),
    (
        THREE + "  - {between: [0, 1], rate: -5Mbit}",
        "3: rate of link 1: '-5Mbit' is negative: a rate is at least 0",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 0kbit}",
        "3: rate of link 1: '0kbit' is out of range: expected more than 0: from 1bit/s to 1000Tbit/s",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1e9Tbit}",
        "3: rate of link 1: '1e9Tbit' is out of range: expected more than 0: from 1bit/s to 1000Tbit/s",
    ),
    (
        THREE + "  - {between: [0, 1], rate: }",
        "3: rate of link 1 is empty: expected a number with a unit, more than 0: from 1bit/s to 1000Tbit/s",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit, latency: 2h}",
        "3: latency of link 1: '2h' is out of range: expected from 0s to 1h",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit, loss: 100%}",
        "3: loss of link 1: '100%' is out of range: expected at least 0% and less than 100%",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit}\n  - {between: [1, 3], rate: 1Mbit}",
        "4: rank 3 is not among the nodes: expected 0 to 2",
    ),
    (
        THREE + "  - {between: [0, one], rate: 1Mbit}",
        "3: rank 2: 'one' is not a rank: expected a whole number from 0",
    ),
    (
        THREE + "  - {between: [1, 1], rate: 1Mbit}",
        "3: link 1 joins rank 1 to itself: expected two different ranks",
    ),
    (
        THREE + "  - {from: 2, to: 2, rate: 1Mbit}",
        "3: link 1 joins rank 2 to itself: expected two different ranks",
    ),
    (
        THREE + "  - {between: [0, 1, 2], rate: 1Mbit}",
        "3: 3 ranks in between of link 1: expected two, such as [0, 1]",
    ),
    (
        THREE + "  - {between: 0, rate: 1Mbit}",
        "3: between of link 1 is '0': expected two ranks, such as [0, 1]",
    ),
    (THREE + "  - {rate: 1Mbit}", "3: link 1 has no ends: expected between, or from and to"),
    (THREE + "  - {to: 1, rate: 1Mbit}", "3: link 1 has to: expected between, or from and to"),
    (
        THREE + "  - {between: [0, 1], to: 1, rate: 1Mbit}",
        "3: link 1 has between and to: expected between, or from and to",
    ),
    (LINKED + "  - {from: 1, to: 0, rate: 2Mbit}", "5: link 3: link 1→0 is given twice; first in line 3"),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit}",
        "3: there is no path from ranks 0, 1 to rank 2: expected links that connect all ranks",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit}\n  - {from: 2, to: 1, rate: 1Mbit}",
        "3: there is no path from ranks 0, 1 to rank 2: expected links that connect all ranks",
    ),
    (
        THREE + "  - {between: [0, 1], rate: 1Mbit}\n  - {from: 1, to: 2, rate: 1Mbit}",
        "3: there is no path from rank 2 to ranks 0, 1: expected links that connect all ranks",
    ),
    (LINKED + "routing: direct", "5: routing is 'direct': expected overlay or underlay"),
    (LINKED + "routing: [overlay]", "5: routing is a list: expected overlay or underlay"),
    (LINKED + "changes:\n  at: 3s", "6: changes is a mapping: expected a list of changes"),
    (
        LINKED + "changes:\n  - {between: [0, 1], rate: 1Mbit}",
        "6: change 1 has no at: expected at: 180s, for instance",
    ),
    (
        LINKED + "changes:\n  - {at: 3s, between: [0, 1]}",
        "6: change 1 changes nothing: expected rate, latency or loss",
    ),
    (
        LINKED + "changes:\n  - {at: 180, between: [0, 1], rate: 1Mbit}",
        (
            "6: at of change 1: '180' has no unit: a duration is a number and one of ns, us, ms, s, min, h, "
            "such as '180s'"
        ),
    ),
    (
        LINKED + "changes:\n  - {at: 3s, between: [0, 2], rate: 1Mbit}",
        "6: change 1: a change of link 0→2, which does not exist",
    ),
    (
        LINKED
        + "changes:\n  - {at: 3s, between: [0, 1], rate: 1Mbit}\n"
        + "  - {at: 3000ms, from: 1, to: 0, rate: 2Mbit}",
        "7: change 2: link 1→0 is changed twice at 3.0s; first in line 6",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_a_wrong_file_is_refused_with_line_value_and_what_is_allowed(text: str, message: str):
    with pytest.raises(NetworkFileError) as caught:
        parse_network(text, "wan.yaml")

    assert str(caught.value) == f"wan.yaml:{message}"


def test_a_long_value_is_cut_short_in_the_message():
    with pytest.raises(NetworkFileError) as caught:
        parse_network("nodes: {0: {}}\nrouting: " + "x" * 10_000)

    assert len(str(caught.value)) < 150


def test_a_long_list_of_ranks_is_cut_short_in_the_message():
    with pytest.raises(NetworkFileError) as caught:
        parse_network("nodes: {" + ", ".join(f"{rank}: " for rank in range(40)) + "}\nlinks: []")

    assert str(caught.value).endswith(
        "from rank 0 to ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 27 more: "
        "expected links that connect all ranks"
    )


def test_thousands_of_nodes_more_than_can_be_planned_for_are_refused():
    with pytest.raises(NetworkFileError, match=r"^network:1: 4097 nodes: expected at most 4096$"):
        parse_network("nodes: {" + ", ".join(f"{rank}: " for rank in range(4097)) + "}\nlinks: []")


def test_the_message_names_the_file_that_was_loaded(tmp_path: Path):
    path = tmp_path / "wan.yaml"
    path.write_text("nodes:\n  0: {egress: 3}\n")

    with pytest.raises(
        NetworkFileError, match=f"^{re.escape(str(path))}:2: egress of rank 0: '3' has no unit"
    ):
        load_network(path)


def test_a_file_that_is_not_there_a_folder_and_an_impossible_name_are_said_to_be_so(tmp_path: Path):
    missing = tmp_path / "missing.yaml"

    with pytest.raises(NetworkFileError) as caught:
        load_network(missing)
    assert str(caught.value) == f"{missing}: the network file cannot be read: No such file or directory"
    with pytest.raises(NetworkFileError, match=r"cannot be read: Is a directory$"):
        load_network(tmp_path)
    with pytest.raises(NetworkFileError, match=r"cannot be read: embedded null byte$"):
        load_network("a\0b")


def test_a_file_in_another_encoding_is_refused_with_the_line(tmp_path: Path):
    path = tmp_path / "wan.yaml"
    path.write_bytes("nodes:\n  0: {site: Zürich}\n".encode("latin-1"))

    with pytest.raises(NetworkFileError) as caught:
        load_network(path)

    assert str(caught.value) == f"{path}:2: byte 0xfc is not UTF-8: expected a text file in UTF-8"


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("netstorm.topology.files.MAX_BYTES", 20)
    path = tmp_path / "wan.yaml"
    path.write_text("nodes: {0: {}} # and more")

    with pytest.raises(NetworkFileError, match=r"more than 20 bytes, which is the limit$"):
        load_network(path)


# What a person or a program might leave behind: pieces of a real file in any order, YAML's own characters.
yamls_own = [
    "&a",
    "*a",
    "<<",
    "---\n",
    "...",
    "!!int",
    "!",
    "%",
    "\t",
    "|\n",
    ">",
    "?",
    "'",
    '"',
    "\\U",
    "\x85",
    "~",
]
pieces = st.sampled_from([*re.findall(r"\w+|[^\w\s]|\s+", GOOD), *yamls_own])
mutilated = st.tuples(st.integers(0, len(GOOD)), st.integers(0, 30), st.text(max_size=5)).map(
    lambda cut: GOOD[: cut[0]] + cut[2] + GOOD[cut[0] + cut[1] :]
)


@given(st.text() | st.lists(pieces, max_size=60).map("".join) | mutilated)
@example("%YAML 99999999999999999999.1\n---\n{}")
@example("\ud800")
@example("!<%FF> a")
def test_no_text_does_more_than_be_refused_with_a_line(text: str):
    try:
        network = parse_network(text, "wan.yaml")
    except NetworkFileError as error:
        line = re.match(r"wan\.yaml:(\d+): ", str(error))
        assert line is not None
        assert 1 <= int(line[1]) <= len(re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text))
    else:
        assert parse_network(dump_network(network)) == network


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(data)

    with pytest.raises(NetworkFileError):
        load_network(path)


# ---------------------------------------------------------------------------------------------- tensor sizes
# Models: how many parameters they have, as published, and what is said about files that are wrong.


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("alexnet", 16, 61_100_840), ("resnet50", 161, 25_557_032)],  # as torchvision publishes them
)
def test_a_model_has_as_many_parameters_as_published(model, tensors, parameters):
    sizes = tensors_of(model)
    assert len(sizes) == tensors
    assert sum(sizes) == 4 * parameters


def test_layers_next_to_the_input_come_first():
    assert alexnet_shapes()[0] == (64, 3, 11, 11)
    assert alexnet_shapes()[-1] == resnet50_shapes()[-1] == (1000,)
    assert resnet50_shapes()[0] == (64, 3, 7, 7)


def test_most_of_alexnet_is_in_three_dense_layers():
    dense = [shape for shape in alexnet_shapes() if len(shape) == 2]
    assert sum(map(math.prod, dense)) == 9216 * 4096 + 4096 * 4096 + 4096 * 1000


def test_a_size_is_one_tensor():
    assert tensors_of("244MB") == (244_000_000,)
    assert tensors_of("1MiB") == (1_048_576,)


def test_a_file_lists_shapes_or_bytes(tmp_path: Path):
    path = tmp_path / "model.json"
    tensors = [{"name": "a", "shape": [3, 5]}, {"shape": [7], "dtype": "float16"}, {"shape": []}, 9]
    path.write_text(json.dumps(tensors), encoding="utf-8")
    assert tensors_of(str(path)) == (60, 14, 4, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vgg", "model 'vgg': expected alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        ("244", "has no unit"),
        ("0MB", "expected a size of at least 1B"),
        ("9999999TB", "at most 1024TiB"),
        ("nowhere/model.json", "nowhere/model.json: the model cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_model_is_named(text, message):
    with pytest.raises(UsageError) as caught:
        tensors_of(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the model is not JSON"),
        ("[" * 100_000, "the model is not JSON"),
        ("[" + "9" * 5000 + "]", "the model is not JSON: Exceeds the limit"),
        ('[{"shape": [' + "999, " * 100_000 + "1]}]", "elements or more: expected at most 1125899906842624"),
        ("{}", "expected a list of tensors"),
        ("[]", "expected a list of tensors"),
        ("[true]", "tensor 0 is True: expected its bytes"),
        ("[4, 0]", "tensor 1 has 0 bytes: expected at least 1"),
        ('[{"shape": [1, 0]}]', "tensor 0 has shape [1, 0]: expected a list of whole numbers from 1"),
        ('[{"shape": [true]}]', "tensor 0 has shape [True]"),
        ('[{"name": "a"}]', "tensor 0 has shape None"),
        ('[{"shape": "12"}]', "tensor 0 has shape '12'"),
        ('[{"shape": [2], "dtype": "float12"}]', "tensor 0 has dtype 'float12': expected one of float64"),
        ('[{"shape": [2], "size": 8}]', "tensor 0 has 'size': expected name, shape and dtype"),
        ('[{"shape": [99999999, 99999999, 99999999]}]', "at most 1125899906842624"),
    ],
)
def test_a_wrong_file_is_named_with_the_tensor_and_the_value(tmp_path: Path, content, message):
    path = tmp_path / "model.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        tensors_of(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)

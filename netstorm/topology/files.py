"""Network files: a network as people write it, in YAML, with units.

nodes: {0: {site: seattle, egress: 600Mbit, ingress: 600Mbit}, 1: {site: denver}}   # access caps optional
links:                                            # undirected unless from and to; numbers per direction
  - {between: [0, 1], rate: 100Mbit, latency: 15ms, loss: 0.02%}
routing: overlay                                  # or underlay: all pairs may talk, over shortest hops
changes:                                          # optional, by time since the start
  - {at: 180s, between: [0, 1], rate: 40Mbit}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Final, NoReturn, TypeAlias

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import (
    LATENCY,
    LOSS,
    RATE,
    TIME,
    Bounds,
    Change,
    Link,
    Node,
    Rank,
    checked_site,
    shown_ranks,
)
from netstorm.topology.networks.network import Network, NetworkMismatch, Routing
from netstorm.topology.networks.text import dump_network
from netstorm.topology.networks.yaml_source import Item, Source, read_text, shortened
from netstorm.units import parse_duration, parse_fraction, parse_rate

__all__ = ["MAX_NODES", "dump_network", "load_network", "parse_network"]

MAX_NODES: Final = 4096
"""What is computed for each pair of more nodes than this would take minutes, and gigabytes."""

_SECTIONS: Final = ("nodes", "links", "routing", "changes")
_EXAMPLES: Final = {
    "nodes": "{0: {}, 1: {}}",
    "links": "[{between: [0, 1], rate: 100Mbit}]",
    "rate": "100Mbit, for instance",
    "at": "180s, for instance",
}
_RANK: Final = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)
_LINK_FIELDS: Final = ("between", "from", "to", "rate", "latency", "loss")
_CHANGE_FIELDS: Final = ("at", *_LINK_FIELDS)

Fields: TypeAlias = Mapping[str, Item]
Origins: TypeAlias = list[tuple[Link | Change, Item]]
"""Where in the file each link and change was given."""


def load_network(path: str | PathLike[str]) -> Network:
    """Return the network that a file describes.

    Raises:
        NetworkFileError: the file cannot be read, or says something that is not allowed: `FILE:LINE: …`.
    """
    return parse_network(read_text(path, "the network file"), str(path))


def parse_network(text: str, name: str = "network") -> Network:
    """Return the network that `text` describes; `name` is the file's in messages.

    Raises:
        NetworkFileError: `NAME:LINE:`, the value, and what is allowed.
    """
    top = Source(name).parse(text, f"a mapping with {', '.join(_SECTIONS)}")
    sections = top.fields(_SECTIONS, top=True)
    nodes = _nodes(_required(sections, "nodes", top))
    links: Origins = []
    if len(nodes) > 1 or "links" in sections:
        for item in _required(sections, "links", top).items("a list of links", "link"):
            links += _links(item, len(nodes))
    changes: Origins = []
    if "changes" in sections:
        for item in sections["changes"].items("a list of changes", "change"):
            changes += _changes(item, len(nodes))
    try:
        network = Network(
            nodes=nodes,
            links=tuple(link for link, _ in links if isinstance(link, Link)),
            routing=_routing(sections["routing"]) if "routing" in sections else Routing.OVERLAY,
            changes=tuple(change for change, _ in changes if isinstance(change, Change)),
        )
    except NetworkMismatch as error:
        _fail_mismatch(error, links if isinstance(error.item, Link) else changes)
    _check_connected(network, sections.get("links", top))
    return network


def _nodes(section: Item) -> tuple[Node, ...]:
    found: dict[int, Node] = {}
    pairs = section.pairs(
        "a mapping from rank to node, such as {0: {site: seattle}, 1: {}}", lambda rank: f"rank {rank}"
    )
    if not pairs:
        section.fail("no nodes: expected at least one, such as {0: {}}")
    if len(pairs) > MAX_NODES:
        section.fail(f"{len(pairs)} nodes: expected at most {MAX_NODES}")
    for key, item in pairs:
        rank = key.read(_rank, "a rank")
        if rank >= len(pairs):
            given = {key.read(_rank, "a rank") for key, _ in pairs}
            missing = next(rank for rank in itertools.count() if rank not in given)
            key.fail(
                f"rank {rank}: expected ranks 0 to {len(pairs) - 1}, since there are {len(pairs)} nodes; "
                f"rank {missing} is missing"
            )
        fields: Fields = {} if item.is_null else item.fields(("site", "egress", "ingress"))
        found[rank] = Node(
            rank=rank,
            site=fields["site"].read(checked_site, "a name") if "site" in fields else "",
            egress=_optional(fields, "egress", parse_rate, RATE),
            ingress=_optional(fields, "ingress", parse_rate, RATE),
        )
    return tuple(node for _, node in sorted(found.items()))


def _links(item: Item, size: int) -> Origins:
    fields = item.fields(_LINK_FIELDS)
    ends = _ends(fields, item, size)
    rate = _quantity(_required(fields, "rate", item), parse_rate, RATE)
    latency = _optional(fields, "latency", parse_duration, LATENCY) or 0.0
    loss = _optional(fields, "loss", parse_fraction, LOSS) or 0.0
    return [
        (Link(source=source, target=target, rate=rate, latency=latency, loss=loss), item)
        for source, target in ends
    ]


def _changes(item: Item, size: int) -> Origins:
    fields = item.fields(_CHANGE_FIELDS)
    at = _quantity(_required(fields, "at", item), parse_duration, TIME)
    ends = _ends(fields, item, size)
    if not fields.keys() & {"rate", "latency", "loss"}:
        item.fail(f"{item.what} changes nothing: expected rate, latency or loss")
    rate = _optional(fields, "rate", parse_rate, RATE)
    latency = _optional(fields, "latency", parse_duration, LATENCY)
    loss = _optional(fields, "loss", parse_fraction, LOSS)
    return [
        (Change(at=at, source=source, target=target, rate=rate, latency=latency, loss=loss), item)
        for source, target in ends
    ]


def _ends(fields: Fields, item: Item, size: int) -> tuple[tuple[Rank, Rank], ...]:
    """Return (source, target), and the reverse too if they are given as `between`."""
    given = [name for name in ("between", "from", "to") if name in fields]
    if given == ["from", "to"]:
        ends = [fields["from"], fields["to"]]
    elif given == ["between"]:
        ends = fields["between"].items("two ranks, such as [0, 1]", "rank")
        if len(ends) != 2:
            fields["between"].fail(
                f"{len(ends)} ranks in between of {item.what}: expected two, such as [0, 1]"
            )
    else:
        item.fail(f"{item.what} has {' and '.join(given) or 'no ends'}: expected between, or from and to")
    source, target = (_declared(end, size) for end in ends)
    if source == target:
        ends[1].fail(f"{item.what} joins rank {source} to itself: expected two different ranks")
    return ((source, target),) if given != ["between"] else ((source, target), (target, source))


def _declared(item: Item, size: int) -> Rank:
    rank = item.read(_rank, "a rank")
    if rank >= size:
        item.fail(f"rank {rank} is not among the nodes: expected 0 to {size - 1}")
    return rank


def _required(fields: Fields, name: str, item: Item) -> Item:
    if name not in fields:
        item.fail(f"{item.what} has no {name}: expected {name}: {_EXAMPLES[name]}")
    return fields[name]


def _optional(fields: Fields, name: str, parse: Callable[[str], float], bounds: Bounds) -> float | None:
    return _quantity(fields[name], parse, bounds) if name in fields else None


def _quantity(item: Item, parse: Callable[[str], float], bounds: Bounds) -> float:
    def read(text: str) -> float:
        value = parse(text)
        if not bounds.allow(value):
            raise UsageError(f"{text!r} is out of range: expected {bounds.words}")
        return value

    return item.read(read, f"a number with a unit, {bounds.words}")


def _rank(text: str) -> Rank:
    if not _RANK.fullmatch(text):
        raise UsageError(f"{shortened(text)} is not a rank: expected a whole number from 0")
    return Rank(int(text))


def _routing(item: Item) -> Routing:
    allowed = {routing.value: routing for routing in Routing}
    text = item.text(" or ".join(allowed))
    if text not in allowed:
        item.fail(f"{item.what} is {shortened(text)}: expected {' or '.join(allowed)}")
    return allowed[text]


def _fail_mismatch(error: NetworkMismatch, origins: Origins) -> NoReturn:
    item = next(item for thing, item in origins if thing is error.item)
    first = next((item for thing, item in origins if str(thing) == str(error.item)))
    item.fail(f"{item.what}: {error}" + (f"; first in line {first.line}" if first is not item else ""))


def _check_connected(network: Network, section: Item) -> None:
    parts = network.separated()
    if parts is not None:
        before, after = map(shown_ranks, parts)
        section.fail(f"there is no path from {before} to {after}: expected links that connect all ranks")

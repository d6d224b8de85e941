"""A network as the text of a network file: the reverse of `parse_network`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final

from netstorm.topology.networks.elements import Change, Link, Node
from netstorm.topology.networks.network import Network

__all__ = ["dump_network"]

_RATES: Final = {"Tbit": 12, "Gbit": 9, "Mbit": 6, "kbit": 3, "bit": 0}
_DURATIONS: Final = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_FRACTIONS: Final = {"%": -2}
_LONGEST: Final = 24
"""Characters of a number that is written without an exponent."""

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)


def dump_network(network: Network) -> str:
    """Return the text of a network file that `parse_network` reads as an equal network.

    Numbers are exact, not rounded for people, down to 1e-90. A link with equal numbers in both directions is
    written once.
    """
    lines = ["nodes:"]
    lines += [f"  {node.rank}: {_braces(_node_text(node))}" for node in network.nodes]
    lines += _section("links", [_braces(fields) for fields in _links(network)])
    lines.append(f"routing: {network.routing.value}")
    if network.changes:
        lines += _section("changes", [_braces(fields) for fields in _changes(network)])
    return "\n".join(lines) + "\n"


def _section(name: str, entries: list[str]) -> list[str]:
    return [f"{name}:", *(f"  - {entry}" for entry in entries)] if entries else [f"{name}: []"]


def _node_text(node: Node) -> Iterator[tuple[str, str]]:
    if node.site:
        plain = _PLAIN.fullmatch(node.site) and node.site.lower() != "null"
        quoted = node.site.replace("\\", "\\\\").replace('"', '\\"')
        yield "site", node.site if plain else f'"{quoted}"'
    if node.egress is not None:
        yield "egress", _exact(node.egress, _RATES)
    if node.ingress is not None:
        yield "ingress", _exact(node.ingress, _RATES)


def _links(network: Network) -> Iterator[list[tuple[str, str]]]:
    values = {(link.source, link.target): list(_values(link)) for link in network.links}
    for (source, target), fields in values.items():
        both = values.get((target, source)) == fields
        if not both or source < target:
            yield [*_ends(source, target, both=both), *fields]


def _changes(network: Network) -> Iterator[list[tuple[str, str]]]:
    values = {(change.at, change.source, change.target): list(_values(change)) for change in network.changes}
    for (at, source, target), fields in values.items():
        both = values.get((at, target, source)) == fields
        if not both or source < target:
            yield [("at", _exact(at, _DURATIONS)), *_ends(source, target, both=both), *fields]


def _ends(source: int, target: int, *, both: bool) -> list[tuple[str, str]]:
    return [("between", f"[{source}, {target}]")] if both else [("from", str(source)), ("to", str(target))]


def _values(item: Link | Change) -> Iterator[tuple[str, str]]:
    if item.rate is not None:
        yield "rate", _exact(item.rate, _RATES)
    if item.latency is not None:
        yield "latency", _exact(item.latency, _DURATIONS)
    if item.loss is not None:
        yield "loss", _exact(item.loss, _FRACTIONS)


def _braces(fields: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields) + "}"


def _exact(value: float, exponents: Mapping[str, int]) -> str:
    """Return `value` in the largest unit of which there is one, else in the smallest, without rounding."""
    number = Decimal(repr(float(value)))
    fitting = [unit for unit, exponent in exponents.items() if number >= Decimal(10) ** exponent]
    unit = fitting[0] if fitting else list(exponents)[-1 if number else 0]
    scaled = number.scaleb(-exponents[unit]).normalize()
    text = f"{scaled:f}"
    return f"{text if len(text) <= _LONGEST else scaled}{unit}"

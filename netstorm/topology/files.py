"""What people write in files: networks and trees, in YAML, and the sizes of tensors."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import yaml

from netstorm.errors import NetworkFileError, TopologyFileError, UsageError
from netstorm.topology.network import (
    LATENCY,
    LATITUDE,
    LONGITUDE,
    LOSS,
    PRICE,
    RATE,
    TIME,
    Bounds,
    Change,
    Link,
    Network,
    NetworkMismatch,
    Node,
    Rank,
    Routing,
    checked_site,
    shown_ranks,
)
from netstorm.topology.policy import Forest
from netstorm.topology.tree import Tree
from netstorm.units import parse_bytes, parse_duration, parse_fraction, parse_rate

__all__ = [
    "MAX_NODES",
    "MODELS",
    "alexnet_shapes",
    "custom",
    "dump_network",
    "load_network",
    "parse_network",
    "parse_topology",
    "resnet50_shapes",
    "tensors_of",
]


# YAML with the line of each value, for error messages that name it.

T = TypeVar("T")

MAX_BYTES: Final = 32 * 1024 * 1024
"""A full mesh of 512 nodes has 12 MB."""

_DEEPEST: Final = 32
"""Nested `[` and `{`; the files that are read here have four."""


def read_text(path: str | PathLike[str], what: str, error_type: type[UsageError] = NetworkFileError) -> str:
    """Return the text of a file, called `what` in messages.

    Raises:
        UsageError: of `error_type`: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise error_type(f"{path}: {what} cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise error_type(f"{path}: {what} has more than {MAX_BYTES} bytes, which is the limit")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise error_type(
            f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8: expected a text file in UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """Reads YAML that is not nested deeply: for each `[` the parser looks at every one that is still open."""

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        """See the base class.

        Raises:
            RecursionError: nested too deeply.
        """
        if self.flow_level >= _DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(kind)


class Source:
    """The name of a text, and where in it something is wrong."""

    def __init__(self, name: str, error_type: type[UsageError] = NetworkFileError) -> None:
        self.name: Final = name
        self._error_type: Final = error_type

    def fail(self, line: int, message: str) -> NoReturn:
        """Raise the error for a line, counted from 1."""
        raise self._error_type(f"{self.name}:{line}: {message}")

    def parse(self, text: str, expected: str) -> Item:
        """Return the top value of a YAML document. Nothing is constructed: no tag can call anything.

        The parser is PyYAML's own: libyaml's crashes on deep nesting.

        Raises:
            UsageError: the text is not YAML, or empty; `expected` says what it should have been.
        """
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self.fail(line, f"not YAML: character {error.character!r}: {error.reason}")
        except (ValueError, OverflowError):  # the parser's own, with no line: \UFFFFFFFF, %YAML 1.999…
            self.fail(1, "not YAML: an escaped character, or a number, that is out of range")
        except RecursionError:
            self.fail(1, "not YAML that can be read: nested too deeply")
        if node is None:
            self.fail(1, f"empty: expected {expected}")
        return Item(self, node, "the file")


class Item:
    """A value in the text, and what it is called in messages."""

    __slots__ = ("_node", "_source", "line", "what")

    def __init__(self, source: Source, node: yaml.Node, what: str) -> None:
        self._source: Final = source
        self._node: Final = node
        self.what: Final = what
        self.line: Final[int] = node.start_mark.line + 1

    def fail(self, message: str) -> NoReturn:
        """Raise the error of this kind of file for this value's line."""
        self._source.fail(self.line, message)

    @property
    def is_null(self) -> bool:
        """Whether nothing, or null, is written here."""
        return isinstance(self._node, yaml.ScalarNode) and str(self._node.tag) == "tag:yaml.org,2002:null"

    def pairs(self, expected: str, each: Callable[[str], str]) -> list[tuple[Item, Item]]:
        """Return keys and values of a mapping, the value of key k called `each(k)`; no key is there twice."""
        if not isinstance(self._node, yaml.MappingNode):
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        found: dict[str, Item] = {}
        pairs = []
        for key_node, value_node in self._node.value:
            key = Item(self._source, key_node, f"a key of {self.what}")
            text = key.text("a word or a number")
            if text in found:
                key.fail(f"{shortened(text)} is given twice in {self.what}; first in line {found[text].line}")
            found[text] = key
            pairs.append((key, Item(self._source, value_node, each(text))))
        return pairs

    def fields(self, known: Sequence[str], *, top: bool = False) -> dict[str, Item]:
        """Return the values of a mapping whose keys are all among `known`."""
        allowed = ", ".join(known)
        fields = {}
        for key, value in self.pairs(
            f"a mapping with {allowed}", lambda name: name if top else f"{name} of {self.what}"
        ):
            name = key.text("a word")
            if name not in known:
                close = difflib.get_close_matches(name[:60], known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                key.fail(f"unknown key {shortened(name)} in {self.what}: expected {allowed}{hint}")
            fields[name] = value
        return fields

    def items(self, expected: str, each: str) -> list[Item]:
        """Return the values of a list; the n-th is called `each` n."""
        if not isinstance(self._node, yaml.SequenceNode):
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        return [Item(self._source, node, f"{each} {n}") for n, node in enumerate(self._node.value, start=1)]

    def text(self, expected: str) -> str:
        """Return a single value as it is written, without quotes."""
        if not isinstance(self._node, yaml.ScalarNode) or self.is_null:
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        return str(self._node.value)

    def read(self, read: Callable[[str], T], expected: str) -> T:
        """Return `read` of the text; its `UsageError` becomes one for this line."""
        text = self.text(expected)
        try:
            return read(text)
        except UsageError as error:
            self.fail(f"{self.what}: {error}")

    def _shown(self) -> str:
        if isinstance(self._node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self._node, yaml.SequenceNode):
            return "a list"
        return "empty" if self.is_null else shortened(self._node.value)


def shortened(text: str) -> str:
    """Return a text in quotes, as messages show it: no message is longer than a person reads."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


# Network files: a network as people write it, in YAML, with units.
#
# nodes: {0: {site: seattle, egress: 600Mbit, ingress: 600Mbit}, 1: {site: denver}}   # access caps optional
# links:                                            # undirected unless from and to; numbers per direction
#   - {between: [0, 1], rate: 100Mbit, latency: 15ms, loss: 0.02%}
# routing: overlay                                  # or underlay: all pairs may talk, over shortest hops
# changes:                                          # optional, by time since the start
#   - {at: 180s, between: [0, 1], rate: 40Mbit}

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
_DEGREES: Final = re.compile(r"[-+]?[0-9]{1,3}(\.[0-9]{1,17})?", re.ASCII)
_CHANGE_FIELDS: Final = ("at", "between", "from", "to", "rate", "latency", "loss")
_LINK_FIELDS: Final = (*_CHANGE_FIELDS[1:], "price")
_NODE_FIELDS: Final = ("site", "egress", "ingress", "lat", "lon", "price")
_PRICE: Final = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,17})?)/GB", re.ASCII)

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
    nodes, prices = _nodes(_required(sections, "nodes", top))
    links: Origins = []
    if len(nodes) > 1 or "links" in sections:
        for item in _required(sections, "links", top).items("a list of links", "link"):
            links += _links(item, prices)
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


def _nodes(section: Item) -> tuple[tuple[Node, ...], list[float]]:
    """Return the nodes, and what a GB out of each costs."""
    prices: dict[int, float] = {}
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
        fields: Fields = {} if item.is_null else item.fields(_NODE_FIELDS)
        if ("lat" in fields) != ("lon" in fields):
            item.fail(f"{item.what} has one of lat and lon: expected both or neither")
        prices[rank] = _price(fields, 0.0)
        found[rank] = Node(
            rank=rank,
            site=fields["site"].read(checked_site, "a name") if "site" in fields else "",
            egress=_optional(fields, "egress", parse_rate, RATE),
            ingress=_optional(fields, "ingress", parse_rate, RATE),
            lat=_degrees(fields, "lat", LATITUDE),
            lon=_degrees(fields, "lon", LONGITUDE),
        )
    return tuple(node for _, node in sorted(found.items())), [price for _, price in sorted(prices.items())]


def _links(item: Item, prices: Sequence[float]) -> Origins:
    fields = item.fields(_LINK_FIELDS)
    ends = _ends(fields, item, len(prices))
    rate = _quantity(_required(fields, "rate", item), parse_rate, RATE)
    latency = _optional(fields, "latency", parse_duration, LATENCY) or 0.0
    loss = _optional(fields, "loss", parse_fraction, LOSS) or 0.0
    return [
        (
            Link(
                source=source,
                target=target,
                rate=rate,
                latency=latency,
                loss=loss,
                price=_price(fields, prices[source]),
            ),
            item,
        )
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


def _price(fields: Fields, default: float) -> float:
    def read(text: str) -> float:
        found = _PRICE.fullmatch(text)
        if found is None or not PRICE.allow(float(found[1])):
            raise UsageError(f"{shortened(text)}: expected {PRICE.words}, such as 0.09/GB")
        return float(found[1])

    return fields["price"].read(read, "a price, such as 0.09/GB") if "price" in fields else default


def _degrees(fields: Fields, name: str, bounds: Bounds) -> float | None:
    def read(text: str) -> float:
        if _DEGREES.fullmatch(text) is None or not bounds.allow(float(text)):
            raise UsageError(f"{shortened(text)}: expected {bounds.words}")
        return float(text)

    return fields[name].read(read, bounds.words) if name in fields else None


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


# A network as the text of a network file: the reverse of `parse_network`.

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
    lines += _section("links", [_braces(fields) for fields in _link_texts(network)])
    lines.append(f"routing: {network.routing.value}")
    if network.changes:
        lines += _section("changes", [_braces(fields) for fields in _change_texts(network)])
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
    if node.lat is not None and node.lon is not None:
        yield "lat", f"{Decimal(repr(node.lat)):f}"
        yield "lon", f"{Decimal(repr(node.lon)):f}"


def _link_texts(network: Network) -> Iterator[list[tuple[str, str]]]:
    values = {(link.source, link.target): list(_values(link)) for link in network.links}
    for (source, target), fields in values.items():
        both = values.get((target, source)) == fields
        if not both or source < target:
            yield [*_ends_text(source, target, both=both), *fields]


def _change_texts(network: Network) -> Iterator[list[tuple[str, str]]]:
    values = {(change.at, change.source, change.target): list(_values(change)) for change in network.changes}
    for (at, source, target), fields in values.items():
        both = values.get((at, target, source)) == fields
        if not both or source < target:
            yield [("at", _exact(at, _DURATIONS)), *_ends_text(source, target, both=both), *fields]


def _ends_text(source: int, target: int, *, both: bool) -> list[tuple[str, str]]:
    return [("between", f"[{source}, {target}]")] if both else [("from", str(source)), ("to", str(target))]


def _values(item: Link | Change) -> Iterator[tuple[str, str]]:
    if item.rate is not None:
        yield "rate", _exact(item.rate, _RATES)
    if item.latency is not None:
        yield "latency", _exact(item.latency, _DURATIONS)
    if item.loss is not None:
        yield "loss", _exact(item.loss, _FRACTIONS)
    if isinstance(item, Link) and item.price:
        yield "price", f"{Decimal(repr(item.price)):f}/GB"


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


# Tensor sizes of one iteration: of a known model, a given size, or a file. New models belong here.

Shape: TypeAlias = tuple[int, ...]

_CLASSES: Final = 1000
"""ImageNet's."""
_FLOAT32: Final = 4
_WIDTHS: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
_MAX_FILE_BYTES: Final = 16 * 1024 * 1024
_MAX_TENSOR_BYTES: Final = 2**50
"""A pebibyte: more is a mistake, and its chunks could not be counted in reasonable time."""


def alexnet_shapes() -> tuple[Shape, ...]:
    """Return the shapes of AlexNet's parameters: 61 million, one tower, as all frameworks have it [1]_.

    References:
        .. [1] Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997.
    """
    channels = (3, 64, 192, 384, 256, 256)
    kernels = (11, 5, 3, 3, 3)
    shapes: list[Shape] = []
    for (before, after), kernel in zip(pairwise(channels), kernels, strict=True):
        shapes += [(after, before, kernel, kernel), (after,)]
    widths = (256 * 6 * 6, 4096, 4096, _CLASSES)
    for before, after in pairwise(widths):
        shapes += [(after, before), (after,)]
    return tuple(shapes)


def resnet50_shapes() -> tuple[Shape, ...]:
    """Return the shapes of ResNet-50's parameters: 25.6 million in 161 tensors [1]_.

    Convolutions have no bias; each is followed by a batch normalisation with scale and shift.

    References:
        .. [1] He et al., Deep residual learning for image recognition, arXiv 1512.03385, Table 1.
    """
    return tuple(_resnet50())


def _resnet50() -> Iterator[Shape]:
    def convolution(before: int, after: int, kernel: int) -> Iterator[Shape]:
        yield (after, before, kernel, kernel)
        yield (after,)
        yield (after,)

    yield from convolution(3, 64, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(channels, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:  # the shortcut has to change its width too
                yield from convolution(channels, 4 * width, 1)
            channels = 4 * width
    yield (_CLASSES, channels)
    yield (_CLASSES,)


MODELS: Final[Mapping[str, Callable[[], tuple[Shape, ...]]]] = {
    "alexnet": alexnet_shapes,
    "resnet50": resnet50_shapes,
}


def tensors_of(text: str) -> tuple[int, ...]:
    """Return the bytes of each tensor of a model, in order of priority: the layers next to the input first.

    Args:
        text: `alexnet` or `resnet50` (float32, 1000 classes); a size such as 244MB, which is one tensor; or
            the path of a JSON file with a list of tensors, each its bytes or an object with `shape`, and if
            they are not float32 `dtype`.

    Raises:
        UsageError: none of these, or a file that says something else.
    """
    if text in MODELS:
        return tuple(_FLOAT32 * math.prod(shape) for shape in MODELS[text]())
    if text.endswith(".json") or "/" in text or Path(text).is_file():
        return _read(Path(text))
    if not text[:1].isdigit():
        raise UsageError(
            f"model {text!r}: expected {', '.join(MODELS)}, a size such as 244MB, or the path of a .json file"
        )
    size = parse_bytes(text)
    if not 0 < size <= _MAX_TENSOR_BYTES:
        raise UsageError(f"model {text!r}: expected a size of at least 1B and at most 1024TiB")
    return (size,)


def _read(path: Path) -> tuple[int, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise UsageError(f"{path}: the model has more than {_MAX_FILE_BYTES} bytes, which is the limit")
        entries = json.loads(data)
    except OSError as error:
        raise UsageError(f"{path}: the model cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, or a number of thousands of digits
        raise UsageError(f"{path}: the model is not JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        example = '[{"name": "fc_weight", "shape": [10, 64]}] or [2560]'
        raise UsageError(f"{path}: expected a list of tensors, such as {example}")
    return tuple(_bytes_of(entry, f"{path}: tensor {place}") for place, entry in enumerate(entries))


def _bytes_of(entry: object, where: str) -> int:
    if isinstance(entry, Mapping):
        unknown = sorted(set(entry) - {"name", "shape", "dtype"})
        if unknown:
            raise UsageError(f"{where} has {unknown[0]!r}: expected name, shape and dtype")
        size = _width(entry.get("dtype", "float32"), where) * _elements(entry.get("shape"), where)
    elif isinstance(entry, int) and not isinstance(entry, bool):
        size = entry
    else:
        raise UsageError(f"{where} is {entry!r}: expected its bytes, or an object with its shape")
    if not 0 < size <= _MAX_TENSOR_BYTES:
        raise UsageError(f"{where} has {size} bytes: expected at least 1, and at most {_MAX_TENSOR_BYTES}")
    return size


def _width(dtype: object, where: str) -> int:
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise UsageError(f"{where} has dtype {dtype!r}: expected one of {', '.join(_WIDTHS)}")
    return _WIDTHS[dtype]


def _elements(shape: object, where: str) -> int:
    lengths: list[Any] = shape if isinstance(shape, list) else [None]
    if not all(type(length) is int and length > 0 for length in lengths):
        raise UsageError(f"{where} has shape {shape!r}: expected a list of whole numbers from 1")
    elements = 1
    for length in lengths:
        elements *= length
        if elements > _MAX_TENSOR_BYTES:  # the product of millions of lengths would take minutes
            raise UsageError(f"{where} has {elements} elements or more: expected at most {_MAX_TENSOR_BYTES}")
    return elements


# Custom topologies: trees that the user writes down, in YAML.
#
# trees:
#   - {root: 0, parent: {1: 0, 2: 0, 3: 2}, share: 2}        # reduced and broadcast along the same edges
#   - {root: 1, reduce: {0: 2, 2: 1, 3: 1}, broadcast: {0: 1, 2: 0, 3: 0}}     # share: 1 if not given

_MAPS: Final = ("parent", "reduce", "broadcast")
_FIELDS: Final = ("root", *_MAPS, "share")
_SHARE: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)
_EXAMPLE: Final = "[{root: 0, parent: {1: 0, 2: 0}}]"
_LARGEST_SHARE: Final = 1e6


def custom(network: Network, path: str | PathLike[str]) -> Forest:
    """Return the trees that a file describes.

    Raises:
        UsageError: no file is given.
        TopologyFileError: the file cannot be read, describes no spanning trees, or uses a pair of ranks that
            may not talk in `network`: `FILE:LINE: …`.
    """
    if not str(path):
        raise UsageError(
            "topology custom without a file: expected NETSTORM_TOPOLOGY_FILE to name one that holds "
            f"trees: {_EXAMPLE}"
        )
    return parse_topology(read_text(path, "the topology file", TopologyFileError), network, str(path))


def parse_topology(text: str, network: Network, name: str = "topology") -> Forest:
    """Return the trees that `text` describes; `name` is the file's in messages.

    Raises:
        TopologyFileError: `NAME:LINE:`, the value, and what is allowed.
    """
    top = Source(name, TopologyFileError).parse(text, f"trees: {_EXAMPLE}")
    section = top.fields(("trees",), top=True).get("trees")
    if section is None:
        top.fail(f"{top.what} has no trees: expected trees: {_EXAMPLE}")
    items = section.items("a list of trees", "tree")
    if not items:
        section.fail(f"no trees: expected at least one, such as {_EXAMPLE}")
    pairs = frozenset[tuple[int, int]](network.pairs())
    read = [_tree(item, network.size, pairs) for item in items]
    return Forest(
        trees=tuple(tree for tree, _ in read),
        shares=tuple(share for _, share in read),
        reason=f"custom: {len(read)} {'tree' if len(read) == 1 else 'trees'} of {name}",
    )


def _tree(item: Item, size: int, pairs: frozenset[tuple[int, int]]) -> tuple[Tree, float]:
    fields = item.fields(_FIELDS)
    if "root" not in fields:
        item.fail(f"{item.what} has no root: expected root: 0, for instance")
    root = _rank_of_tree(fields["root"], size)
    given = [name for name in _MAPS if name in fields]
    if given not in (["parent"], ["reduce", "broadcast"]):
        item.fail(
            f"{item.what} has {' and '.join(given) or 'no parents'}: expected parent, or reduce and broadcast"
        )
    up = _parents(fields[given[0]], root, size)
    down = _parents(fields[given[-1]], root, size)
    for child, (parent, at) in up.items():
        _check_pair(at, (child, parent), pairs)
    for child, (parent, at) in down.items():
        _check_pair(at, (parent, child), pairs)
    share = fields["share"].read(_share, "a number") if "share" in fields else 1.0
    try:
        tree = Tree(
            root=root,
            reduce_parent=tuple(up[rank][0] if rank != root else -1 for rank in range(size)),
            broadcast_parent=tuple(down[rank][0] if rank != root else -1 for rank in range(size)),
        )
    except UsageError as error:  # a cycle: the lines of its ranks are those of the tree
        item.fail(f"{item.what}: {error}")
    return tree, share


def _parents(section: Item, root: Rank, size: int) -> dict[int, tuple[int, Item]]:
    """Return the parent of each rank but the root, and where it is given."""
    parents: dict[int, tuple[int, Item]] = {}
    for key, value in section.pairs(
        f"a mapping from rank to its parent, for all ranks but the root, {root}",
        lambda rank: f"parent of {rank}",
    ):
        rank = _rank_of_tree(key, size)
        if rank == root:
            key.fail(f"rank {rank} is the root: expected no parent of it")
        parents[rank] = _rank_of_tree(value, size), value
        if parents[rank][0] == rank:
            value.fail(f"rank {rank} is its own parent: expected another rank")
    missing = sorted(set(range(size)) - set(parents) - {root})
    if missing:
        section.fail(
            f"{section.what} has no parent of {shown_ranks(missing)}: expected one for all {size} ranks but "
            f"the root, {root}"
        )
    return parents


def _check_pair(item: Item, pair: tuple[int, int], pairs: frozenset[tuple[int, int]]) -> None:
    if pair not in pairs:
        item.fail(
            f"{item.what} lets rank {pair[0]} send to rank {pair[1]}, to which it has no link: expected "
            "pairs that may talk in this network"
        )


def _rank_of_tree(item: Item, size: int) -> Rank:
    rank = item.read(_rank, "a rank")
    if rank >= size:
        item.fail(f"{item.what}: there is no rank {rank}: expected 0 to {size - 1}")
    return rank


def _share(text: str) -> float:
    share = float(text) if _SHARE.fullmatch(text) else 0.0
    if not 0 < share <= _LARGEST_SHARE:
        raise UsageError(f"{shortened(text)} is not a share: expected a number above 0, such as 1, 2.5 or 10")
    return share

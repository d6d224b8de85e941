"""Custom topologies: trees that the user writes down, in YAML.

trees:
  - {root: 0, parent: {1: 0, 2: 0, 3: 2}, share: 2}        # reduced and broadcast along the same edges
  - {root: 1, reduce: {0: 2, 2: 1, 3: 1}, broadcast: {0: 1, 2: 0, 3: 0}}     # share: 1 if not given
"""

from __future__ import annotations

import re
from os import PathLike
from typing import Final

from netstorm.errors import TopologyFileError, UsageError
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.networks.network import Network
from netstorm.topology.networks.yaml_source import Item, Source, read_text, shortened
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest

__all__ = ["custom", "parse_topology"]

_MAPS: Final = ("parent", "reduce", "broadcast")
_FIELDS: Final = ("root", *_MAPS, "share")
_RANK: Final = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)
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
    root = _declared(fields["root"], size)
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
        rank = _declared(key, size)
        if rank == root:
            key.fail(f"rank {rank} is the root: expected no parent of it")
        parents[rank] = _declared(value, size), value
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


def _declared(item: Item, size: int) -> Rank:
    rank = item.read(_rank, "a rank")
    if rank >= size:
        item.fail(f"{item.what}: there is no rank {rank}: expected 0 to {size - 1}")
    return rank


def _rank(text: str) -> Rank:
    if not _RANK.fullmatch(text):
        raise UsageError(f"{shortened(text)} is not a rank: expected a whole number from 0")
    return Rank(int(text))


def _share(text: str) -> float:
    share = float(text) if _SHARE.fullmatch(text) else 0.0
    if not 0 < share <= _LARGEST_SHARE:
        raise UsageError(f"{shortened(text)} is not a share: expected a number above 0, such as 1, 2.5 or 10")
    return share

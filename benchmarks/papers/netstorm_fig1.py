#!/usr/bin/env python3
"""NetStorm, Fig. 1f and 3, and §IV-B: delays of trees, links with one root and several, time to form FAPTs.

python benchmarks/papers/netstorm_fig1.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from typing import Final

from common import CHUNK, Row, arguments, internet2, report

from netstorm.topology.form import form_policy
from netstorm.topology.network import Network, Rank, generate
from netstorm.topology.policy import Policy
from netstorm.topology.schemes import fapt
from netstorm.topology.tree import Tree, reduce_delay, subtree_delay, transfer_delays

_PARENTS: Final = {2: 1, 6: 2, 7: 2, 8: 2, 3: 1, 9: 3, 14: 9, 4: 1, 10: 4, 11: 4, 13: 4, 5: 1, 12: 5}
"""Fig. 1c, its balanced tree, by the nodes' numbers there."""
_DELAYS: Final = {2: 24, 6: 24, 3: 15, 9: 20, 4: 18, 10: 23, 5: 50, 12: 7}
"""Of the edges up from a node, as far as §III-A (a) gives them; the others are shorter, and do not count."""
_NODES: Final = 14
"""In Fig. 1."""
_GIVEN: Final = (
    "the text gives the delays of this tree's slowest paths; those of all links are in the figure only."
)
_DRAWN: Final = (
    "the delays of the figure's links are not in its text; ours are meshes of 14 nodes with drawn rates. It "
    "is the delay of one chunk: Fig. 14 has times of rounds, in which a chain of chunks is under way."
)
_ROOTS: Final = "the figure's numbers are not in the text. Shares are by quality."
_FORMING: Final = "O(|V|^3) in the paper; seconds on one core, which other programs share."


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "")
    rows = [*_worked_example(), *_delays(options.seeds), *_links(options.seeds), *_forming()]
    report("NetStorm Fig. 1f, Fig. 3, Algorithms 1 to 3", rows, options)


def _worked_example() -> list[Row]:
    ranks = range(_NODES)
    tree = Tree.undirected(Rank(0), tuple(_PARENTS.get(rank + 1, 0) - 1 for rank in ranks))
    delays = {(rank, tree.reduce_parent[rank]): float(_DELAYS.get(rank + 1, 0)) for rank in ranks}
    rows = []
    for node, paper in ((2, 24), (3, 20), (4, 23), (5, 7), (1, 57)):
        found = subtree_delay(tree, delays, Rank(node - 1))
        rows.append(Row(what=f"w(T_v{node})", paper=str(paper), ours=f"{found:g}", why=_GIVEN, value=found))
    return rows


def _delays(seeds: int) -> list[Row]:
    ratios: dict[str, list[float]] = {"star": [], "balanced": [], "mst": []}
    for seed in range(seeds):
        network = generate("mesh", _NODES, seed)
        delays = transfer_delays(network, CHUNK)
        best = reduce_delay(
            fapt(network, 1, chunk_bytes=CHUNK).trees[0], delays
        )  # as the paper's, for a chunk
        for name, found in ratios.items():
            tree = form_policy(network, name, chunk_bytes=CHUNK).trees[0]
            found.append(reduce_delay(tree, delays) / best)
    return [
        Row(
            what=f"delay of one chunk, {name} over FAPT",
            paper="above 1",
            ours=f"{statistics.median(found):.2f} x ({min(found):.2f} - {max(found):.2f})",
            why=_DRAWN,
            value=statistics.median(found),
        )
        for name, found in ratios.items()
    ]


def _links(seeds: int) -> list[Row]:
    rows = []
    for family in ("internet2", "mesh"):
        less, used = [], []
        for seed in range(seeds):
            network = internet2(seed) if family == "internet2" else generate("mesh", 9, seed)
            one, nine = (
                _load(network, form_policy(network, "fapt", num_roots=roots, chunk_bytes=CHUNK))
                for roots in (1, 9)
            )
            less.append(max(nine.values()) / max(one.values()))
            used.append((len(one) / len(network.links), len(nine) / len(network.links)))
        share, others = statistics.median(less), [statistics.fmean(each) for each in zip(*used, strict=True)]
        rows.append(
            Row(
                what=f"hottest link with 9 roots over 1, {family}",
                paper="below 1",
                ours=f"{share:.2f} x; links in use {others[0]:.0%} and {others[1]:.0%}",
                why=_ROOTS,
                value=share,
            )
        )
    return rows


def _load(network: Network, policy: Policy) -> Counter[tuple[int, int]]:
    """Return the part of a model that goes over each link, in use only, up and down."""
    load: Counter[tuple[int, int]] = Counter()
    for tree, weight in zip(policy.trees, policy.weights, strict=True):
        for rank, (up, down) in enumerate(zip(tree.reduce_parent, tree.broadcast_parent, strict=True)):
            if rank != tree.root:
                ends = ((rank, up), (down, rank))
                for link in itertools.chain.from_iterable(
                    network.route(Rank(one), Rank(other)) for one, other in ends
                ):
                    load[link.source, link.target] += weight
    return load


def _forming() -> list[Row]:
    rows = []
    for nodes in (9, 32, 128):
        network = generate("internet2", nodes, 0)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            form_policy(network, "fapt", chunk_bytes=CHUNK)
            times.append(time.perf_counter() - began)
        found = min(times)
        rows.append(
            Row(
                what=f"forming FAPTs of all roots, {nodes} nodes",
                paper="low",
                ours=f"{1000 * found:.0f} ms",
                why=_FORMING,
                value=found,
            )
        )
    return rows


if __name__ == "__main__":
    main()

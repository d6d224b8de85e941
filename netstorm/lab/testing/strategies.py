"""Hypothesis strategies for networks (small values, many ties, all legal shapes) and for fault plans."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from netstorm.lab.testing.faults import Fault, random_plan
from netstorm.topology.network import Change, Link, Network, Node, Rank, Routing

__all__ = ["fault_plans", "networks", "rates"]

Pair = tuple[int, int]


def rates() -> st.SearchStrategy[float]:
    """Rates in bit/s: any whole kbit/s, and a few values that are drawn often, so that ties occur."""
    return st.sampled_from([20e6, 100e6, 155e6]) | st.integers(1, 1_000_000).map(lambda kbit: kbit * 1e3)


def _latencies() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.015, 0.03]) | st.integers(0, 500_000).map(lambda us: us / 1e6)


def _losses() -> st.SearchStrategy[float]:
    return st.just(0.0) | st.integers(0, 200_000).map(lambda ppm: ppm / 1e6)


@st.composite
def networks(
    draw: st.DrawFn,
    min_nodes: int = 1,
    max_nodes: int = 9,
    *,
    symmetric: bool | None = None,
    capped: bool = False,
    changing: bool = False,
    routing: Routing | None = Routing.OVERLAY,
) -> Network:
    """Generate connected networks: a random spanning tree, and more links at random.

    Args:
        symmetric: both directions of each link are equal; False: they are drawn apart, and links beyond the
            spanning tree may lead one way only; None: either kind of network.
        capped: some nodes have access caps.
        changing: links change over time.
        routing: None: either.
    """
    size = draw(st.integers(min_nodes, max_nodes))
    alike = draw(st.booleans()) if symmetric is None else symmetric
    pairs = draw(_connected_pairs(size, one_way=not alike))
    values: dict[Pair, tuple[float, float, float]] = {}
    for source, target in pairs:
        if alike and (target, source) in values:
            values[source, target] = values[target, source]
        else:
            values[source, target] = (draw(rates()), draw(_latencies()), draw(_losses()))
    caps = st.none() | rates() if capped else st.none()
    return Network(
        nodes=tuple(
            Node(
                rank=Rank(rank),
                site=draw(st.sampled_from(["", "denver", "tokyo"])),
                egress=draw(caps),
                ingress=draw(caps),
            )
            for rank in range(size)
        ),
        links=tuple(
            Link(source=Rank(source), target=Rank(target), rate=rate, latency=latency, loss=loss)
            for (source, target), (rate, latency, loss) in values.items()
        ),
        routing=draw(st.sampled_from(Routing)) if routing is None else routing,
        changes=draw(_changes(pairs)) if changing and pairs else (),
    )


@st.composite
def _connected_pairs(draw: st.DrawFn, size: int, *, one_way: bool) -> list[Pair]:
    names = draw(st.permutations(range(size)))
    tree = {(names[draw(st.integers(0, place - 1))], names[place]) for place in range(1, size)}
    others = [(i, j) for i in range(size) for j in range(i) if not {(i, j), (j, i)} & tree]
    more = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    pairs = [pair for i, j in [*sorted(tree), *more] for pair in ((i, j), (j, i))]
    if one_way and more:
        dropped = draw(st.sets(st.sampled_from([(j, i) for i, j in more])))
        pairs = [pair for pair in pairs if pair not in dropped]
    return pairs


def _changes(pairs: list[Pair]) -> st.SearchStrategy[tuple[Change, ...]]:
    values = st.tuples(st.none() | rates(), st.none() | _latencies(), st.none() | _losses())
    change = st.builds(
        lambda at, pair, values: Change(
            at=at,
            source=Rank(pair[0]),
            target=Rank(pair[1]),
            rate=values[0],
            latency=values[1],
            loss=values[2],
        ),
        st.sampled_from([0.0, 180.0]) | st.integers(0, 3_600_000).map(lambda ms: ms / 1e3),
        st.sampled_from(pairs),
        values.filter(lambda values: any(value is not None for value in values)),
    )
    return st.lists(change, max_size=6, unique_by=lambda c: (c.at, c.source, c.target)).map(tuple)


def fault_plans(
    nodes: int, *, duration_s: float = 1.0, most: int = 5, longest_cut_s: float = 5.0
) -> st.SearchStrategy[Sequence[Fault]]:
    """Return a Hypothesis strategy for plans as `random_plan` makes them, which shrink fault by fault.

    Args:
        nodes: number of ranks of the job.
        duration_s: faults begin in this time.
        most: largest number of faults.
        longest_cut_s: longest time until a cut is healed.
    """
    return st.lists(
        st.integers(0, 2**20).map(
            lambda seed: random_plan(
                nodes, seed, duration_s=duration_s, faults=1, longest_cut_s=longest_cut_s
            )[0]
        ),
        max_size=most,
    )

"""How near the schemes come to the optimum, how long they take to form, and what wrong estimates cost.

    python benchmarks/studies/topologies.py fractions                                         # 4 minutes
    python benchmarks/studies/topologies.py fractions --nodes 32 --seeds 10 --chunk 1000000   # 5 minutes
    python benchmarks/studies/topologies.py fractions --nodes 32 --tensor 24400000000 --fluid # 2 minutes
    python benchmarks/studies/topologies.py formation                                         # 1 minute
    python benchmarks/studies/topologies.py estimates                                         # 2 minutes

fractions: the optimum's time over a scheme's, in the fluid model and as predicted, mean over seeds.
formation: processor seconds to form a policy against the number of nodes, and the exponent that fits them; in
the JSON also those of the wall clock.
estimates: policies formed on links that are 20 % off, and with half of the links never measured, evaluated on
the true network. Networks are those of `netstorm.topology.network`, with seeds
from 0 (--first-seed) on.
Each writes JSON with --json FILE; Ctrl-C prints and writes what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from netstorm.topology.form import SCHEMES, Options
from netstorm.topology.network import FAMILIES, Link, Network, generate
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Resources, fluid_time, optimum

MB: Final = 1_000_000
TENSOR: Final = 244 * MB
"""AlexNet in float32, in one piece."""
SHOWN: Final = tuple(name for name in SCHEMES if name != "custom")
UNMEASURED: Final = 25
"""Percentile of the measured rates that a link without a measurement is given."""
OFF: Final = 0.2
LIMIT_S: Final = 60.0
"""A scheme that takes longer at N nodes is not asked again at more."""

Row = dict[str, Any]


def main() -> None:
    """Run one part."""
    options = _arguments()
    rows: list[Row] = []
    interrupted = False
    try:
        for row in PARTS[options.part](options):
            rows.append(row)
            at = " ".join(f"{name}={row[name]}" for name in ("family", "nodes", "seed"))
            print(f"\r{len(rows)}: {at}\033[K", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    print(file=sys.stderr)
    summary = SUMMARIES[options.part](rows)
    if options.json is not None:
        arguments = {name: value for name, value in vars(options).items() if name != "json"}
        content = {"arguments": arguments, "complete": not interrupted, "summary": summary, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if interrupted:
        print(f"interrupted after {len(rows)} of the networks")
        sys.exit(130)


def _arguments() -> argparse.Namespace:
    text, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="may be repeated; default: all")
    parser.add_argument("--nodes", type=int, action="append", metavar="N", help="may be repeated")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many networks of each kind")
    parser.add_argument(
        "--first-seed", type=int, default=0, metavar="N", help="seed of the first; default: 0"
    )
    parser.add_argument("--chunk", type=int, action="append", metavar="BYTES", help="may be repeated")
    parser.add_argument("--tensor", type=int, default=TENSOR, metavar="BYTES", help="default: %(default)s")
    parser.add_argument("--fluid", action="store_true", help="fractions: do not predict")
    parser.add_argument("--scheme", action="append", choices=SHOWN, help="may be repeated; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args()
    nodes, seeds = {
        "fractions": ([9], 30),
        "formation": ([9, 16, 32, 64, 128], 1),
        "estimates": ([9], 30),
    }[options.part]
    options.family = options.family or (["mesh"] if options.part == "formation" else list(FAMILIES))
    options.nodes = options.nodes or nodes
    options.seeds = options.seeds or seeds
    options.chunk = options.chunk or ([256 * 1024, MB] if options.part == "fractions" else [MB])
    options.scheme = options.scheme or list(SHOWN)
    if options.seeds < 1 or min(options.nodes) < 2 or min(options.chunk) < 1:
        parser.error("expected at least 1 seed, 2 nodes and 1 byte")
    return options


def _networks(options: argparse.Namespace) -> Iterator[tuple[Row, Network]]:
    for family in options.family:
        for nodes in options.nodes:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                yield {"family": family, "nodes": nodes, "seed": seed}, generate(family, nodes, seed)


# -------------------------------------------------------------------------------------------------- fractions


def fractions(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each network's fractions of the optimum by scheme and chunk."""
    nbytes = options.tensor
    for row, network in _networks(options):
        resources, best = Resources.of(network), optimum(network, nbytes).seconds
        reached: Row = {}
        for chunk in options.chunk:
            for scheme in options.scheme:
                policy = SCHEMES[scheme](network, Options(tensors=(nbytes,), chunk_bytes=chunk)).policy(0)
                found = {"fluid": best / fluid_time(resources, policy, nbytes)}
                if not options.fluid:
                    took = predict(network, policy, [nbytes], chunk_bytes=chunk).seconds
                    found["predicted"] = best / took
                reached[f"{scheme} {chunk}"] = found
        yield {**row, "optimum_s": best, "reached": reached}


def show_fractions(rows: Sequence[Row]) -> Row:
    """Print a table for each number of nodes and chunk; return the means."""
    means: Row = {}
    for nodes in sorted({row["nodes"] for row in rows}):
        for case in sorted({case for row in rows for case in row["reached"]}, key=_place):
            for family in FAMILIES:
                found = [
                    row["reached"][case] for row in rows if (row["nodes"], row["family"]) == (nodes, family)
                ]
                if found:
                    scheme, chunk = case.split()
                    means[f"{nodes} {chunk} {family} {scheme}"] = {
                        kind: statistics.fmean(one[kind] for one in found) for kind in found[0]
                    }
    for table in dict.fromkeys(name.rsplit(" ", 2)[0] for name in means):
        nodes, chunk = table.split()
        families = [one for one in FAMILIES if any(name.startswith(f"{table} {one} ") for name in means)]
        print(
            f"\n{nodes} nodes, chunks of {int(chunk) / MB:.2f} MB: part of the optimum, fluid and predicted"
        )
        print("".join(f"{heading:>14}" for heading in ("", *families)))
        for scheme in SHOWN:
            found = [means.get(f"{table} {family} {scheme}") for family in families]
            if any(found):
                cells = [" ".join(f"{value:.3f}" for value in one.values()) if one else "" for one in found]
                print(f"{scheme:>14}" + "".join(f"{cell:>14}" for cell in cells))
    return means


def _place(case: str) -> tuple[int, int]:
    scheme, chunk = case.split()
    return int(chunk), SHOWN.index(scheme)


# -------------------------------------------------------------------------------------------------- formation


def formation(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the seconds that each scheme takes to form a policy."""
    # What the first call loads is no part of a scheme.
    warm = generate("mesh", 4, 0)
    for scheme in options.scheme:
        SCHEMES[scheme](warm, Options())
    too_slow: set[str] = set()
    for row, network in sorted(_networks(options), key=lambda one: one[0]["nodes"]):
        seconds: Row = {}
        wall: Row = {}
        for scheme in options.scheme:
            if scheme in too_slow:
                continue
            began, at = time.process_time(), time.perf_counter()
            SCHEMES[scheme](network, Options(tensors=(options.tensor,), chunk_bytes=options.chunk[0]))
            seconds[scheme] = time.process_time() - began
            wall[scheme] = time.perf_counter() - at
            if seconds[scheme] > LIMIT_S:
                too_slow.add(scheme)
        yield {**row, "seconds": seconds, "wall": wall}


def show_formation(rows: Sequence[Row]) -> Row:
    """Print seconds against nodes and the fitted exponents; return them."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for scheme, seconds in row["seconds"].items():
            times[scheme][row["nodes"]].append(seconds)
    sizes = sorted({row["nodes"] for row in rows})
    print("processor seconds to form a policy, and its growth as a power of N")
    print("".join(f"{heading:>12}" for heading in ("", *sizes, "power")))
    summary: Row = {}
    for scheme, by_nodes in times.items():
        medians = {nodes: statistics.median(found) for nodes, found in by_nodes.items()}
        power = _power(medians)
        summary[scheme] = {"seconds": medians, "power": None if math.isnan(power) else power}
        cells = [f"{medians[size]:.4f}" if size in medians else "" for size in sizes]
        print(f"{scheme:>12}" + "".join(f"{cell:>12}" for cell in (*cells, f"{power:.1f}")))
    return summary


def _power(seconds: Mapping[int, float]) -> float:
    """Return the slope of the straight line through the logarithms; NaN for fewer than two points."""
    if len(seconds) < 2:
        return math.nan
    slope, _ = np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)
    return float(slope)


# -------------------------------------------------------------------------------------------------- estimates


def estimates(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the true seconds of `auto` and `fapt` when formed on wrong estimates."""
    for row, network in _networks(options):
        draw = random.Random(f"estimates {row['family']} {row['nodes']} {row['seed']}")
        off = disturbed(network, draw)
        seen = {"exact": network, "off": off, "half measured": half_measured(off, draw)}
        seconds: Row = {}
        for name, estimate in seen.items():
            for scheme in ("auto", "fapt"):
                wanted = Options(tensors=(options.tensor,), chunk_bytes=options.chunk[0])
                policy = SCHEMES[scheme](estimate, wanted).policy(0)
                found = predict(network, policy, wanted.tensors, chunk_bytes=options.chunk[0]).seconds
                seconds.setdefault(name, {})[scheme] = found
        yield {**row, "seconds": seconds}


def disturbed(network: Network, draw: random.Random) -> Network:
    """Return the network with the rate of each direction of a link, and each cap, up to 20 % off."""

    def wrong(rate: float) -> float:
        return rate * draw.uniform(1 - OFF, 1 + OFF)

    return replace(
        network,
        nodes=tuple(
            replace(
                node,
                egress=None if node.egress is None else wrong(node.egress),
                ingress=None if node.ingress is None else wrong(node.ingress),
            )
            for node in network.nodes
        ),
        links=tuple(replace(link, rate=wrong(link.rate)) for link in network.links),
    )


def half_measured(network: Network, draw: random.Random) -> Network:
    """Return the network as if half of its links, in both directions, had never been measured."""
    pairs = sorted({_ends(link) for link in network.links})
    unknown = set(draw.sample(pairs, len(pairs) // 2))
    measured = [link.rate for link in network.links if _ends(link) not in unknown]
    prior = float(np.percentile(measured, UNMEASURED))
    return replace(
        network,
        links=tuple(replace(link, rate=prior) if _ends(link) in unknown else link for link in network.links),
    )


def _ends(link: Link) -> tuple[int, int]:
    return min(link.source, link.target), max(link.source, link.target)


def show_estimates(rows: Sequence[Row]) -> Row:
    """Print the mean time of `auto` over that of `fapt`, and what wrong estimates cost `auto`."""
    print(f"{'':>24}{'auto / fapt: mean':>20}{'worst':>8}{'slower than exact, auto':>26}{'fapt':>8}")
    summary: Row = {}
    for family, nodes in dict.fromkeys((row["family"], row["nodes"]) for row in rows):
        here = [row["seconds"] for row in rows if (row["family"], row["nodes"]) == (family, nodes)]
        for name in here[0]:
            ratios = [one[name]["auto"] / one[name]["fapt"] for one in here]
            auto, fapt = (
                statistics.fmean(one[name][scheme] / one["exact"][scheme] for one in here)
                for scheme in ("auto", "fapt")
            )
            mean, worst = statistics.fmean(ratios), max(ratios)
            summary[f"{nodes} {family} {name}"] = {
                "mean": mean,
                "worst": worst,
                "auto_slower": auto,
                "fapt_slower": fapt,
            }
            print(
                f"{family:>11}{nodes:>4} {name:<13}{mean:>15.3f}{worst:>8.3f}{auto:>26.3f}{fapt:>8.3f}",
            )
    return summary


PARTS: Final[Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]]] = {
    "fractions": fractions,
    "formation": formation,
    "estimates": estimates,
}
SUMMARIES: Final[Mapping[str, Callable[[Sequence[Row]], Row]]] = {
    "fractions": show_fractions,
    "formation": show_formation,
    "estimates": show_estimates,
}


if __name__ == "__main__":
    main()

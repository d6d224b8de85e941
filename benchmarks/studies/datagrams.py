"""How long steps take over TCP and over the datagram lane, on an emulated network that loses packets.

    python benchmarks/studies/datagrams.py --simulated                         # on virtual time: a minute
    sudo python benchmarks/studies/datagrams.py --json datagrams.json          # real: about eight minutes
    sudo python benchmarks/studies/datagrams.py --seconds 6 --loss 0,1% --bursts 0
    sudo python benchmarks/studies/datagrams.py --bounds 0.01,0.1,0.2,0.3 --modes datagrams --loss 1%
    sudo python benchmarks/studies/datagrams.py --queues fifo,dscp --dips --modes datagrams
    sudo python benchmarks/studies/datagrams.py --ablation --turns 2 --seconds 20  # about ten minutes

A hub and sites (network namespaces of this machine); every rank computes, pushes, waits for the sums, and
begins anew. A step's time is from one begin to the next, at each rank. All modes see the same network:

    tcp-cubic, tcp-bbr    all contributions are waited for
    late-cubic, late-bbr  NETSTORM_LOSS_BOUND over TCP
    datagrams             the same bound, NETSTORM_DATAGRAMS=1; results go over TCP with bbr
    datagrams-ordered     messages are handed over in their order, as on a connection
    datagrams-alike       all packets carry the same code point
    datagrams-classes     code points tell layers apart alone (priorities), and
    datagrams-importance  large values from small ones alone (selective dropping)
    datagrams-waiting     with a bound of next to nothing

With --switch all sites' packets share the link into the hub: one of the sites is the switch, too.
--ablation is all of these modes behind such a switch with queues by code point.
Simulated, loss lowers the goodput of bbr to rate x (1 - loss), and limits cubic as Mathis et al. say
(`VirtualNetwork`); packets are lost one by one, and results of the mode datagrams come without loss.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number, seconds, writable
from netstorm.errors import NetStormError
from netstorm.lab.emulation.wan import Wan
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.packets import PacketFaults
from netstorm.protocol.messages import LossTerms
from netstorm.topology.network import Change, Link, Network, Rank, Routing

MODES = ("tcp-cubic", "tcp-bbr", "late-cubic", "late-bbr", "datagrams")
WORKER = Path(__file__).parents[1] / "workers" / "late_steps.py"
_ABLATION = {
    "switch": True,
    "sites": 3,
    "size": 250_000,
    "deadline": 1.3,
    "loss": [0.0],
    "bursts": 0,
    "queues": ["dscp"],
    "modes": [
        *("datagrams", "datagrams-ordered", "datagrams-alike", "datagrams-classes", "datagrams-importance"),
        *("datagrams-waiting", "late-bbr", "tcp-bbr", "tcp-cubic"),
    ],
}
_BURST_LOSS = 0.3
_PATIENCE_S = 180.0
"""How much longer than asked for a mode may take: with cubic and loss, a step may take half a minute."""


def network(options: argparse.Namespace, loss: float, *, bursts: bool) -> Network:
    """Return a star whose links lose packets; in bursts of 100 ms, every 2 s, 30 % of them; and whose uplinks
    fall to a tenth of their rate for a while.
    """
    pairs = [(site, 1 if options.switch and site > 1 else 0) for site in range(1, options.sites + 1)]
    pairs += [(hub, site) for site, hub in pairs]
    made = Network.uniform(options.sites + 1)
    links = [
        Link(source=Rank(a), target=Rank(b), rate=options.rate, latency=options.latency, loss=loss)
        for a, b in pairs
    ]
    changes = []
    for a, b in pairs:
        change = partial(Change, source=Rank(a), target=Rank(b))
        for wanted, every, lasts, to, back in (
            (bursts, 2.0, 0.1, {"loss": _BURST_LOSS}, {"loss": loss}),
            (options.dips and b == 0, 6.0, 1.0, {"rate": options.rate / 10}, {"rate": options.rate}),
        ):
            chance = random.Random(f"{options.seed} {a} {b} {every}")
            at = chance.expovariate(1 / every)
            while wanted and at < options.seconds + _PATIENCE_S:
                changes += [change(at=round(at, 3), **to), change(at=round(at + lasts, 3), **back)]
                at += lasts + chance.expovariate(1 / every)
    changes.sort(key=lambda one: one.at)
    routing = Routing.UNDERLAY if options.switch else Routing.OVERLAY
    return replace(made, links=tuple(links), routing=routing, changes=tuple(changes))


def measure(
    options: argparse.Namespace, mode: str, loss: float, *, bursts: bool, bound: float, queues: str
) -> dict[str, Any]:
    """Train in one mode; return what steps took."""
    made = network(options, loss, bursts=bursts)
    bound = 1e-6 if mode == "datagrams-waiting" else bound
    variables: dict[str, object] = {
        "DMLC_NUM_WORKER": made.size,
        "DMLC_PS_ROOT_PORT": 9091,
        "CHUNK_SIZE": options.chunk,
        "NETSTORM_TOPOLOGY": "star",
        "NETSTORM_HUB": 0,
        "ENABLE_AWARENESS": 0,
        "NETSTORM_CONGESTION": "system",
    }
    if not mode.startswith("tcp"):
        variables |= {"NETSTORM_LOSS_BOUND": bound, "NETSTORM_DEADLINE": f"{options.deadline:.3f}s"}
    lane, _, variant = mode.partition("-") if mode.startswith("datagrams") else ("", "", "")
    if lane:
        variables["NETSTORM_DATAGRAMS"] = 1
    congestion = "cubic" if mode.endswith("cubic") else "bbr"
    with (
        tempfile.TemporaryDirectory() as folder,
        Wan.up(made, congestion=congestion, queues=queues, start_changes=False) as wan,
    ):
        key = Path(folder, "job.key")
        subprocess.run(
            [sys.executable, "-m", "netstorm", "keys", "new", key], check=True, stdout=subprocess.DEVNULL
        )
        variables |= {"DMLC_PS_ROOT_URI": wan.address(Rank(0)), "NETSTORM_KEY_FILE": key}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        elements = options.size // 4 // options.keys
        values = (elements, options.keys, options.compute, options.seconds, folder, variant)
        worker = [sys.executable, str(WORKER), *map(str, values)]
        scheduler = [sys.executable, "-m", "netstorm", "scheduler"]
        processes = [subprocess.Popen(wan.command(Rank(0), scheduler), env=environment)]
        for rank in made.ranks:
            own = {"NETSTORM_RANK": str(rank), "DMLC_NODE_HOST": wan.address(rank), "DMLC_ROLE": "worker"}
            processes.append(subprocess.Popen(wan.command(rank, worker), env=environment | own))
        wan.start_changes()
        deadline = time.monotonic() + options.seconds + _PATIENCE_S
        try:
            for process in processes:
                if process.wait(max(1.0, deadline - time.monotonic())):
                    raise NetStormError(f"{mode}: a process ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            return {"mode": mode, "loss": loss, "bursts": bursts, "dips": options.dips, "steps": 0}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        answers = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("rank*.json"))]
        dropped = sum(link.dropped for link in wan.status())
    counters: Counter[str] = Counter()
    for answer in answers:
        counters.update({name: int(count) for name, count in answer["counters"].items() if count < 1e15})
    times = np.concatenate([answer["times"] for answer in answers])
    firsts = np.concatenate([answer["firsts"] for answer in answers])
    row = {"mode": mode, "loss": loss, "bursts": bursts, "queues": queues, "simulated": False}
    row |= {"dips": options.dips, "first_s": float(firsts.mean()), "dropped": dropped}
    row["cpu"] = float(np.mean([answer["cpu"] for answer in answers]))
    return row | summary(times, 0.0 if mode.startswith("tcp") else bound, counters)


def simulate(
    options: argparse.Namespace, mode: str, loss: float, *, bursts: bool, bound: float
) -> dict[str, Any]:
    """Train in one mode on virtual time; return what steps took."""
    lanes, reliable = mode == "datagrams", mode.startswith("tcp")
    made = network(options, loss, bursts=bursts and not lanes)
    if lanes:
        made = replace(made, links=tuple(replace(link, loss=0.0) for link in made.links))
    cluster = SimulatedCluster(
        made.size,
        network=made,
        seed=options.seed,
        tcp="reno" if mode.endswith("cubic") else "ideal",
        chunk_size=options.chunk,
        topology="star",
        hub=0,
        packet_faults=PacketFaults(loss=loss),
        loss_bound=0.0 if reliable else bound,
        datagrams=lanes,
    ).join()
    terms = None if reliable else LossTerms(bound=bound, deadline_s=options.deadline)
    elements = options.size // 4 // options.keys
    kept = np.zeros((made.size, options.keys, elements), np.float32)
    for node in cluster.nodes:
        for key in range(options.keys):
            node.register(f"layer{key}", (elements,), "float32")
    chance = random.Random(options.seed)
    begun, at = cluster.now, cluster.now
    while bursts and lanes and at < begun + options.seconds:
        at += chance.expovariate(1 / 2.0)
        for start, share in ((at, _BURST_LOSS), (at + 0.1, loss)):
            cluster.at(start, partial(setattr, cluster.packets, "faults", PacketFaults(loss=share)))
        at += 0.1
    times: list[float] = []
    while cluster.now < begun + options.seconds:
        began = cluster.now
        cluster.run_for(options.compute)
        kept += 1
        pending = [
            node.push(
                f"layer{key}", kept[rank, key] if terms else kept[rank, key].copy(), priority=-key, loss=terms
            )
            for rank, node in enumerate(cluster.nodes)
            for key in range(options.keys)
        ]
        cluster.run_until_ended(pending, 600)
        if began > begun + options.seconds / 5:
            times.append(cluster.now - began)
    counters: Counter[str] = Counter()
    for node in cluster.nodes:
        counters.update({name: int(count) for name, count in node.machine.counters.snapshot().items()})
    row = {"mode": mode, "loss": loss, "bursts": bursts, "queues": "fifo", "simulated": True}
    return row | summary(np.array(times), 0.0 if reliable else bound, counters)


def summary(times: Any, bound: float, counters: Counter[str]) -> dict[str, Any]:
    """Return what steps took, in s, and what the transport did."""
    return {
        "bound": bound,
        "steps": len(times),
        "mean_s": float(times.mean()),
        **{f"p{p}_s": float(np.percentile(times, p)) for p in (50, 90, 99)},
        "max_s": float(times.max()),
        "ended_early": counters["chunks_ended_early"],
        "too_late": counters["contributions_too_late"],
        "over_lanes": counters["lane_messages"],
        "packets_resent": counters["lane_packets_resent"],
        "lane_failures": counters["lane_failures"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all modes, print JSON, and return the exit code."""
    options = _options(arguments)
    rows = []
    conditions = [(loss, False) for loss in options.loss] + [(max(options.loss), True)] * options.bursts
    first_seed = options.seed
    try:
        for turn, (loss, bursts) in product(range(options.turns), conditions):
            options.seed = first_seed + turn
            for bound in options.bounds:
                for queues in options.queues:
                    for mode in options.modes:
                        if options.simulated:
                            row = simulate(options, mode, loss, bursts=bursts, bound=bound)
                        else:
                            row = measure(options, mode, loss, bursts=bursts, bound=bound, queues=queues)
                        rows.append(row | {"turn": turn})
                        print(json.dumps(row), file=sys.stderr, flush=True)
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps({"options": vars(options) | {"json": str(options.json)}, "rows": rows}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="on virtual time")
    parser.add_argument("--sites", type=number, default=2)
    parser.add_argument("--rate", type=float, default=10e6, metavar="BIT_S", help="of each direction")
    parser.add_argument("--latency", type=seconds, default=0.02, help="of each direction")
    parser.add_argument("--size", type=amount, default=500_000, help="of the model, such as 500kB")
    parser.add_argument("--keys", type=number, default=4)
    parser.add_argument("--chunk", type=number, default=16_384, help="elements")
    parser.add_argument("--compute", type=seconds, default=0.05)
    parser.add_argument("--seconds", type=seconds, default=12.0, help="of each row")
    parser.add_argument("--deadline", type=seconds, default=0.85, help="NETSTORM_DEADLINE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss", type=_ratios, default=[0.0, 0.0001, 0.001, 0.01])
    parser.add_argument("--bursts", type=int, default=1, choices=(0, 1), help="with the largest loss, too")
    parser.add_argument("--dips", action="store_true", help="uplinks fall to a tenth now and then")
    parser.add_argument("--switch", action="store_true", help="sites share the link into the hub")
    parser.add_argument("--ablation", action="store_true", help="the lane without each of its mechanisms")
    parser.add_argument("--turns", type=number, default=1, help="of all rows, each with dips of its own")
    parser.add_argument("--bounds", type=_ratios, default=[0.2])
    parser.add_argument("--queues", type=lambda text: text.split(","), default=["fifo"])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    vars(options).update(_ABLATION if options.ablation else {})
    return options


def _ratios(text: str) -> list[float]:
    return [float(one.rstrip("%")) / (100 if one.endswith("%") else 1) for one in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How long PyTorch's `_reconfigure` takes on this machine's loopback. Needs PyTorch 2.14.

    python benchmarks/torch_reconfigure.py --nodes 8 --rounds 5
    python benchmarks/torch_reconfigure.py --backend gloo
    sudo python benchmarks/torch_reconfigure.py --nodes 3 --round-trip 0.2    # each rank on a host of its own

All ranks enter a view with the ranks in another order, at once. A round is as long as its slowest rank; a
small all-reduce checks the view. Processor time, of all ranks, is the same on a machine that is busy. Between
rounds ranks wait for as long as a few steps of training take: then members connect ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # dist.FileStore, which type checkers do not see

from netstorm.lab.emulation.namespaces import inside
from netstorm.lab.emulation.wan import Wan
from netstorm.pslite.keys import JobKey
from netstorm.topology.network import Network

_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What all ranks are told."""

    backend: str
    store: str
    nodes: int
    rounds: int
    barrier: Barrier
    answers: SimpleQueue[list[tuple[float, float, float]]]
    hosts: tuple[tuple[str, str], ...]
    """Of each rank: namespace and address; none: all are on this machine."""
    pause_s: float
    """Between two rounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description="PyTorch's _reconfigure on loopback.")
    parser.add_argument("--backend", default="netstorm", metavar="NAME", help="default netstorm")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="ranks; default 8")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="that count; default 5")
    parser.add_argument("--round-trip", type=float, metavar="S", help="between ranks, each in a namespace")
    options = parser.parse_args(arguments)
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts: tuple[tuple[str, str], ...] = ()
        if options.round_trip is not None:
            network = Network.uniform(options.nodes, rate=1e9, latency=options.round_trip / 2)
            wan = stack.enter_context(Wan.up(network))
            hosts = tuple((wan.namespace(rank), wan.address(rank)) for rank in range(options.nodes))
            os.environ["NETSTORM_KEY_FILE"] = f"{folder}/job.key"
            JobKey.create(Path(folder, "job.key"))
        job = _Job(
            backend=options.backend,
            store=f"{folder}/store",
            nodes=options.nodes,
            rounds=options.rounds,
            barrier=spawned.Barrier(options.nodes),
            answers=spawned.SimpleQueue(),
            hosts=hosts,
            pause_s=6 * (options.round_trip or 0.0),
        )
        ranks = [spawned.Process(target=_run, args=(rank, job)) for rank in range(job.nodes)]
        for rank in ranks:
            rank.start()
        of_ranks = [job.answers.get() for _ in ranks]
        for rank in ranks:
            rank.join()
    rounds = list(zip(*of_ranks, strict=True))
    wall = [max(times[0] for times in one) * 1e3 for one in rounds]
    cpu = [sum(times[1] for times in one) * 1e3 for one in rounds]
    first, later = wall[0], wall[1:]
    sums = [max(times[2] for times in one) * 1e3 for one in rounds[1:]]
    round_trip_ms = (options.round_trip or math.inf) * 1e3
    print(
        f"{job.backend}: {job.nodes} ranks reconfigured in {_text(later, round_trip_ms)}, with "
        f"{statistics.median(cpu[1:]):.0f} ms of processor time; the first sum then took "
        f"{_text(sums, round_trip_ms)}; medians of {job.rounds} rounds. The first view, with all imports, "
        f"took {_text([first], round_trip_ms)}"
    )
    return 0


def _text(times_ms: Sequence[float], round_trip_ms: float) -> str:
    text = f"{statistics.median(times_ms):.0f} ms"
    if len(times_ms) > 1:
        text += f" ({min(times_ms):.0f} to {max(times_ms):.0f})"
    trips = statistics.median(times_ms) / round_trip_ms
    return f"{text}, {trips:.1f} round trips" if trips else text


def _run(rank: int, job: _Job) -> None:
    if not job.hosts:
        _reconfigure_often(rank, job)
        return
    namespace, os.environ["DMLC_NODE_HOST"] = job.hosts[rank]
    with inside(namespace):  # as are the threads that begin in it
        _reconfigure_often(rank, job)


def _reconfigure_often(rank: int, job: _Job) -> None:
    private: Any = dist
    reconfigure: Any = private._reconfigure  # noqa: SLF001 -- PyTorch has no other name for it
    handle: Any = private._get_reconfigure_handle  # noqa: SLF001
    named: dict[str, Any] = {"enable_reconfigure": True}
    store = FileStore(job.store, job.nodes)
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=job.nodes, timeout=_TIMEOUT, **named
    )
    times = []
    for number in range(job.rounds + 1):
        store.set(f"{number}/{rank}", handle())
        order = [(place + number) % job.nodes for place in range(job.nodes)]
        handles = [store.get(f"{number}/{each}").decode() for each in order]
        job.barrier.wait()
        began, cpu = time.perf_counter(), time.process_time()
        reconfigure(number, handles).wait()
        entered, used = time.perf_counter(), time.process_time() - cpu
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        times.append((entered - began, used, time.perf_counter() - entered))
        assert tensor.tolist() == [job.nodes] * 10
        job.barrier.wait()
        time.sleep(job.pause_s)
    job.answers.put(times)
    job.barrier.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

"""One worker process of `torch_loopback.py`: a DDP step, and collectives call by call.

Commands: step (a DDP step: its start, end and processor time), small (times all-reduces one after the
other), copy (copies of a large tensor: when each began and ended), issue (times how long the start of an
asynchronous all-reduce holds the caller; its end is waited for, untimed).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from harness.pattern import fill, wrong_sum
from harness.serving import Answer, serve
from systems.base import Case, Node
from systems.registry import SYSTEMS


def step(node: Node, number: int) -> Answer:
    """Take a DDP step, and return when, and its processor time; its sum is checked outside of that time."""
    fill(node, rank=node.rank, number=number)
    dist.barrier()
    busy, start = time.process_time(), time.monotonic()
    node.allreduce()
    finish, cpu_s = time.monotonic(), time.process_time() - busy
    error = wrong_sum(node, nodes=node.nodes, number=number, tolerance=getattr(node, "tolerance", 0.0))
    return {"start": start, "finish": finish, "cpu_s": cpu_s, "error": error}


def small(nbytes: int, count: int) -> Answer:
    """Return the seconds of each of some all-reduces, each of which begins when the one before has ended."""
    times = []
    for _ in range(count):
        tensor = torch.ones(nbytes // 4)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return {"seconds": times}


def copies(nbytes: int) -> Answer:
    """Copy a large tensor of rank 0 in several ways, and one to it; return by call when, and its processor
    time. What has come is checked outside of that time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.full((nbytes // 4 // ranks * ranks,), float(rank))
    parts = list(whole.clone().chunk(ranks)) if rank == 0 else None
    part = torch.full((len(whole) // ranks,), float(rank))
    expected = {"broadcast": (whole, 0), "scatter": (part, 0), "send": (whole, 0)}

    def send() -> None:
        if rank == 0:
            dist.send(whole, ranks - 1)
        elif rank == ranks - 1:
            dist.recv(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: dist.gather(part, parts, 0),
        "scatter": lambda: dist.scatter(part, parts, 0),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": send,
    }
    answer: Answer = {"error": ""}
    for name, call in calls.items():
        if name != "gather":
            for place, target in enumerate(parts or ()):
                target.fill_(float(place * (name != "scatter")))
            if rank:
                expected[name][0].fill_(float(rank))
        dist.barrier()
        busy, start = time.process_time(), time.monotonic()
        call()
        answer[name] = (start, time.monotonic(), time.process_time() - busy)
        if name == "gather":
            right = parts is None or all(bool((got == place).all()) for place, got in enumerate(parts))
        else:
            target, value = expected[name]
            right = (name == "send" and 0 < rank < ranks - 1) or bool((target == value).all())
        if not right:
            answer["error"] = f"a wrong result of {name}"
    return answer


def issue(nbytes: int, count: int) -> Answer:
    """Return the seconds that an asynchronous all-reduce holds its caller, and its thread's processor time.

    The latter does not count that others had the cores or the interpreter lock.
    """
    times, cpu = [], []
    tensor = torch.ones(nbytes // 4)
    for _ in range(count):
        dist.barrier()
        busy, began = time.thread_time(), time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        times.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - busy)
        work.wait()
        tensor.fill_(1.0)
    return {"seconds": times, "cpu_s": cpu}


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the group that the command line names."""
    name, nodes, size = sys.argv[1:]
    node = SYSTEMS[name].join(Case(nodes=int(nodes), bytes=int(size)))

    def do(command: Answer) -> Answer:
        if command["do"] == "step":
            return step(node, command["round"])
        if command["do"] == "copy":
            return copies(command["bytes"])
        measure = {"small": small, "issue": issue}[command["do"]]
        return measure(command["bytes"], command["count"])

    return {"rank": node.rank}, do


if __name__ == "__main__":
    serve(join)

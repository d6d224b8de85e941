"""How fast one link is on this machine: acknowledged chunks between two processes over loopback.

The receiver adds each chunk into a sum in place, as a general node does. Measured with an idle main thread in
the sender and with one that is busy in Python, as a training script is.

    python benchmarks/transport.py --json transport.json
    python benchmarks/transport.py --profile sender
    netstorm keys new /tmp/bench.key && python benchmarks/transport.py --key /tmp/bench.key
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from netstorm import clock
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Peer, bits_to_wire
from netstorm.pslite import Endpoint, Limits, Stack
from netstorm.pslite.admission import Credentials
from netstorm.pslite.io_thread import IoThread
from netstorm.pslite.keys import JobKey
from netstorm.pslite.machine import Admission, Admit, Connect, Instruction, Send
from netstorm.pslite.system import keep_freed_memory
from netstorm.pslite.zeromq import ZmqVan

SENDER, RECEIVER = Peer(0), Peer(1)


class Bench:
    """Sends parts, or adds those that come; says so when the last part of a batch is in."""

    def __init__(self, elements: int) -> None:
        self.instructions: list[Instruction] = []
        self.sum = np.zeros(elements, np.float32)
        self.done = threading.Event()

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Admit everybody."""
        return Admit(Peer(hello.sender))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Add a part in place."""
        if isinstance(message, m.Barrier):
            self.done.set()
        elif isinstance(message, m.Part):
            values = np.frombuffer(payload, np.float32) if payload is not None else self.sum[:0]
            np.add(values, self.sum[: values.size], out=values)
            if message.round:  # marks the last one
                self.instructions.append(Send(peer=peer, message=m.Barrier(number=0)))

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """Give up."""
        print(f"lost {peer}: {reason}", file=sys.stderr)
        self.done.set()

    def tick(self, now: float) -> None:
        """Do nothing."""

    def next_tick(self) -> float:
        """Never."""
        return float("inf")

    def abort(self, error: Exception, now: float) -> None:
        """Give up."""
        self.done.set()

    def take_instructions(self) -> list[Instruction]:
        """See `Machine`."""
        taken, self.instructions = self.instructions, []
        return taken


class ProfiledStack(Stack[Bench]):
    """Profiles the thread it runs on."""

    profile: cProfile.Profile | None = None

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.profile is None:
            self.profile = cProfile.Profile(clock.monotonic)
            self.profile.enable()
        super().tick(now)


def start(rank: int, arguments: argparse.Namespace) -> tuple[Bench, Endpoint, IoThread[Bench], int]:
    """Put a machine to work."""
    keep_freed_memory()
    machine = Bench(arguments.elements)
    credentials = Credentials.of_process(JobKey.load(Path(arguments.key))) if arguments.key else None
    van = ZmqVan(credentials=credentials)
    port = van.bind("127.0.0.1", 0)
    endpoint = Endpoint(
        machine,
        job="benchmark",
        incarnation=rank,
        rank=rank,
        ordered=lambda _: False,
        stamp=clock.monotonic_ns,
        limits=Limits(window_bytes=arguments.window),
    )
    profiled = arguments.profile == ("sender" if rank == SENDER else "receiver")
    stack = (ProfiledStack if profiled else Stack)(machine, endpoint)
    thread = IoThread(stack, van, switch_interval_s=arguments.switch_interval)
    return machine, endpoint, thread, port


def receive(arguments: argparse.Namespace) -> None:
    """Be the receiver until stdin ends."""
    _, _, thread, port = start(RECEIVER, arguments)
    print(port, flush=True)
    for _ in sys.stdin:
        print(json.dumps(processor_time(thread)), flush=True)
    stop(thread)


def processor_time(thread: IoThread[Bench]) -> tuple[float, float]:
    """Return the seconds of processor time of the I/O thread, and of the whole process with libzmq's
    thread.
    """
    return thread.call(lambda _: time.thread_time()).result(), time.process_time()


def stop(thread: IoThread[Bench]) -> None:
    """End the thread; print its profile, if it has one."""
    stack = thread._stack  # noqa: SLF001
    if isinstance(stack, ProfiledStack) and stack.profile is not None:
        profile = stack.profile
        thread.call(lambda _: profile.disable()).result()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    thread.close(1.0)


def send(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a receiver, be the sender, return what was measured."""
    command = [sys.executable, __file__, "--role", "receiver", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        machine, endpoint, thread, _ = start(SENDER, arguments)
        thread.post(
            lambda _: machine.instructions.append(Connect(peer=RECEIVER, host="127.0.0.1", port=port))
        )
        source = np.ones(arguments.elements, np.float32)

        def processors() -> list[float]:
            receiver.stdin.write("\n")  # type: ignore[union-attr]
            receiver.stdin.flush()  # type: ignore[union-attr]
            return [*processor_time(thread), *json.loads(receiver.stdout.readline())]  # type: ignore[union-attr]

        one_batch(machine, thread, source, 16)
        results = [
            measure(machine, thread, source, arguments, processors, busy=busy) for busy in (False, True)
        ]
        with training(busy=True) as count:
            began = clock.monotonic()
            clock.sleep(1.0)
            alone = count() / (clock.monotonic() - began)
        links = endpoint.links()
        window = endpoint.link_state(RECEIVER).window
        stop(thread)
        receiver.communicate()
    return {
        "machine": {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "settings": {
            "chunk_bytes": arguments.elements * 4,
            "chunks": arguments.chunks,
            "switch_interval_s": arguments.switch_interval,
            "window": arguments.window,
            "encrypted": arguments.key is not None,
        },
        "results": results,
        "busy_loops_per_s_without_transport": round(alone),
        "window_bytes_at_the_end": window,
        "link": {f"{peer}": numbers for (peer, _), numbers in links.items()},
    }


def measure(
    machine: Bench,
    thread: IoThread[Bench],
    source: np.ndarray[Any, Any],
    arguments: argparse.Namespace,
    processors: Callable[[], list[float]],
    *,
    busy: bool,
) -> dict[str, Any]:
    """Send several batches; return rates, and the processor time of a chunk."""
    rates, spins = [], []
    before = processors()
    for _ in range(arguments.batches):
        with training(busy=busy) as count:
            began = clock.monotonic()
            one_batch(machine, thread, source, arguments.chunks)
            took = clock.monotonic() - began
        rates.append(arguments.chunks * source.nbytes / took / 1e6)
        spins.append(count() / took)
    chunks = arguments.chunks * arguments.batches
    spent = [
        round((after - earlier) / chunks * 1e6, 1)
        for earlier, after in zip(before, processors(), strict=True)
    ]
    names = ("sender_io_thread", "sender_process", "receiver_io_thread", "receiver_process")
    return {
        "main_thread": "busy" if busy else "idle",
        "median_MB_per_s": round(statistics.median(rates), 1),
        "MB_per_s": [round(rate, 1) for rate in rates],
        "us_per_chunk": round(source.nbytes / statistics.median(rates), 1),
        "processor_us_per_chunk": dict(zip(names, spent, strict=True)),
        "busy_loops_per_s": round(statistics.median(spins)),
    }


def one_batch(machine: Bench, thread: IoThread[Bench], source: np.ndarray[Any, Any], chunks: int) -> None:
    """Send so many chunks and wait until the other machine has the last."""
    machine.done.clear()

    def submit(_: float) -> None:
        for number in range(chunks):
            last = int(number == chunks - 1)
            part = m.Part(
                key=7,
                round=last,
                chunk=number,
                phase=m.Phase.REDUCE,
                version=3,
                tree=1,
                contributors=bits_to_wire(0b101),
                dtype="float32",
            )
            order = (0, 0, number)
            machine.instructions.append(Send(peer=RECEIVER, message=part, payload=source, order=order))

    thread.post(submit)
    if not machine.done.wait(120):
        raise SystemExit("no acknowledgement within 120 s")


@contextlib.contextmanager
def training(*, busy: bool) -> Iterator[Any]:
    """A thread that does nothing but Python, while the main thread waits: the same to the interpreter
    lock.
    """
    stop, count = threading.Event(), [0]

    def spin() -> None:
        while not stop.is_set():
            for _ in range(1000):
                pass
            count[0] += 1000

    thread = threading.Thread(target=spin)
    if busy:
        thread.start()
    yield lambda: count[0]
    stop.set()
    if busy:
        thread.join()


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=["sender", "receiver"], default="sender", help=argparse.SUPPRESS)
    parser.add_argument("--elements", type=int, default=65_536, help="float32 values in a chunk")
    parser.add_argument("--chunks", type=int, default=2000, help="chunks in a batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--window", type=int, default=0, help="bytes; 0: adaptive")
    parser.add_argument("--switch-interval", type=float, default=0.0005, help="s")
    parser.add_argument("--key", metavar="FILE", help="encrypt with a key of `netstorm keys new`")
    parser.add_argument("--profile", choices=["sender", "receiver"], help="of the I/O thread, to stderr")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    if arguments.role == "receiver":
        receive(arguments)
        return
    results = send(arguments)
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

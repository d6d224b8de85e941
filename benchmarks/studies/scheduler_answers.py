"""How soon a scheduler answers while all nodes of a large job report their links and a policy is formed.

    python benchmarks/studies/scheduler_answers.py --nodes 512 --seconds 60 --json answers.json

A real scheduler's process, over TCP on loopback. Two processes play the nodes, of which all begin a round a
second: one plays all but the last, each of which reports `--links` of its links a second and beats. The last
node asks for the next round of a key of its own `--asks` times a second, and takes the times of the answers.
They count from when the scheduler has all nodes. A policy is formed once enough links are measured, as with
real nodes. All ends after `--seconds`, however late the players are.

On a busy machine `--first` gives the scheduler and the last node real-time priority, and others a high one
(`sched(7)`, autogroups): what they take then is their own time, and not that of other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import re
import secrets
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import number, writable
from harness.machine import describe_machine
from netstorm import __version__
from netstorm.protocol import messages as m
from netstorm.protocol.frames import encode_body, open_frames, seal
from netstorm.settings import child_environment
from netstorm.topology.network import Network, Rank, generate

_SIZE: Final = (25_000_000,)
_JOIN_S: Final = 120.0
_LARGE: Final = 300_000
"""Bytes of a message that has a policy for hundreds of nodes."""


class Member:
    """The session of one node with the scheduler: as much of it as the scheduler needs."""

    def __init__(self, context: zmq.Context[Any], port: int, rank: int, nodes: int) -> None:
        """Connect, and ask to join."""
        self.rank: Final = rank
        self.joined = False
        self.answers: list[m.TopologyAnswer] = []
        self.key = -1
        """The number of the last key that was granted."""
        self._sent = 0
        self._received = 0
        self._socket: Final[zmq.Socket[bytes]] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"N" + secrets.token_bytes(8))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        hello = m.Hello(
            job="default", sender=-1, incarnation=rank + 1, receiver=-1, session=rank + 1, received=0
        )
        self._put(hello, 0)
        self._join: Final = m.Join(
            asked_rank=rank,
            num_workers=nodes,
            host=f"10.0.{rank // 250}.{rank % 250 + 1}",
            port=4000,
            site="",
            release=__version__,
            pid=1,
        )

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To be polled."""
        return self._socket

    def say(self, message: m.Message) -> None:
        """Send a message."""
        if isinstance(message, m.Datagram):
            self._put(message, 0)
            return
        self._sent += 1
        self._put(message, self._sent)

    def hear(self) -> None:
        """Take all that has come."""
        before = self._received
        while self._socket.poll(0):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            sequence = int.from_bytes(frames[0][12:20], "little")
            if len(frames[0]) > _LARGE:  # with a policy of hundreds of trees, which takes too long to decode
                self._received, self.joined = max(self._received, sequence), True
                continue
            header = open_frames(frames[0], len(frames))
            self._received = max(self._received, header.sequence)
            self._take(header.message)
        if self._received > before:
            self._put(m.Ack(received=self._received), 0)

    def ask(self, round: int) -> float:
        """Begin a round of its key; return the seconds until the scheduler has answered."""
        asked = time.monotonic()
        self.answers.clear()
        self.say(_begun(self.key, round))
        while not self.answers:
            if not self._socket.poll(30_000):
                raise SystemExit("the scheduler has not answered for 30 s")
            self.hear()
        return time.monotonic() - asked

    def _take(self, message: m.Message) -> None:
        match message:
            case m.Welcome():
                self.say(self._join)
            case m.Joined():
                self.joined = True
            case m.Query(number=query):
                self._put(m.Ack(received=self._received, query=query), 0)
            case m.KeysRegistered(grants=grants):
                self.key = grants[-1].key
            case m.TopologyAnswer():
                self.answers.append(message)
            case m.Refused(reason=reason) | m.PeerGone(reason=reason):
                raise SystemExit(f"rank {self.rank}: {reason}")

    def _put(self, message: m.Message, sequence: int) -> None:
        frame = seal(encode_body(message), sequence=sequence, sent_at=time.time_ns(), payload_crc=None)
        self._socket.send(frame)


def play(port: int, ranks: range, options: argparse.Namespace, *, asks: float) -> None:
    """Play some nodes. Print as JSON how many reported a second; with `asks` when each question was asked,
    and what its answer took in ms.
    """
    nodes, links, seconds = options.nodes, options.links, options.seconds
    network, draw = generate("mesh", nodes, 1), random.Random(ranks.start)
    gc.freeze()  # a collection of all those links would take .2 s, and count as an answer's time
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    members = [Member(context, port, rank, nodes) for rank in ranks]
    poller = zmq.Poller()
    by_socket = {member.socket: member for member in members}
    for member in members:
        poller.register(member.socket, zmq.POLLIN)

    def serve(until: float) -> None:
        while True:
            left = max(0.0, until - time.monotonic())
            for socket, _ in poller.poll(int(1e3 * min(left, 0.2))):
                by_socket[socket].hear()
            if not left:
                return

    deadline = time.monotonic() + _JOIN_S
    while not all(member.joined for member in members):
        if time.monotonic() > deadline:
            raise SystemExit(f"{sum(not member.joined for member in members)} nodes have not joined")
        serve(time.monotonic() + 0.1)
    everyone = m.KeySpec(namespace=0, name="w", shape=_SIZE, dtype="float32")
    own = m.KeySpec(namespace=0, name="asks", shape=(4,), dtype="float32", members=(ranks[0],))
    for member in members:
        member.say(m.RegisterKeys(keys=(own if asks else everyone,)))
    while any(member.key < 0 for member in members):
        serve(time.monotonic() + 0.1)
    began, step = time.monotonic(), 1 / asks if asks else 1 / len(members)
    took: list[tuple[float, float]] = []
    turns = 0
    for turn in itertools.count():
        due = began + turn * step
        if max(due, time.monotonic()) > began + seconds:
            break
        serve(due)
        turns += 1
        member = members[turn % len(members)]
        if asks:
            asked = time.monotonic()
            took.append((asked - began, 1e3 * member.ask(turn)))
            if turn % int(max(1, asks)) == 0:
                member.say(m.Heartbeat())
            continue
        member.say(m.Measured(links=tuple(_reports(network, member.rank, links, draw))))
        member.say(_begun(member.key, turn // len(members)))
        member.say(m.Heartbeat())
    print(json.dumps(took or turns / seconds), flush=True)


def _begun(key: int, round: int) -> m.TopologyRequest:
    return m.TopologyRequest(begun=(m.RoundBegun(key=key, round=round, rule=""),))


def _reports(network: Network, rank: int, links: int, draw: random.Random) -> Iterator[m.LinkMeasure]:
    others = [other for other in network.ranks if other != rank]
    for other in draw.sample(others, min(links, len(others))):
        link = network.link(other, Rank(rank))
        yield m.LinkMeasure(
            source=other,
            rate=link.rate * draw.uniform(0.97, 1.03),
            error=0.03,
            latency=link.latency,
            chunks=10,
        )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return how long answers took, while a policy was formed and otherwise."""
    ready, log, machine = folder / "ready", folder / "log", describe_machine()
    environment: dict[str, Any] = {
        "DMLC_NUM_WORKER": str(options.nodes),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "NETSTORM_SECURITY": "off",
        "NETSTORM_TOPOLOGY": options.topology,
        "NETSTORM_LOG": "info",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "netstorm", "scheduler", "--port", "0", "--ready-file", str(ready)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as out:
            processes.append(
                subprocess.Popen(command, env=child_environment(**environment), stdout=out, stderr=out)
            )
        while not ready.exists():
            if processes[0].poll() is not None:
                raise SystemExit(log.read_text(encoding="utf-8"))
            time.sleep(0.05)
        port = ready.read_text(encoding="utf-8").strip().rpartition(":")[2]
        seconds = str(options.seconds)
        for ranks, asks in (
            ((0, options.nodes - 1), 0.0),
            ((options.nodes - 1, options.nodes), options.asks),
        ):
            play_them = [sys.executable, __file__, "--play", port, *map(str, ranks), str(asks)]
            play_them += ["--nodes", str(options.nodes), "--links", str(options.links), "--seconds", seconds]
            processes.append(subprocess.Popen(play_them, stdout=subprocess.PIPE, start_new_session=True))
        watched = psutil.Process(processes[0].pid)
        forming: list[tuple[float, float]] = []
        """When, on the monotonic clock, and the processor time of the worker until then."""
        with selectors.DefaultSelector() as selector:
            assert processes[2].stdout is not None
            selector.register(processes[2].stdout, selectors.EVENT_READ)
            while not selector.select(0.25):
                for process in (processes[0], processes[2]) if options.first else ():
                    _favour(process.pid)
                workers = watched.children()
                others = [*(worker.pid for worker in workers), processes[1].pid]
                for pid in others if options.first else ():
                    with contextlib.suppress(OSError):  # it has just ended
                        Path(f"/proc/{pid}/autogroup").write_text("-10", encoding="ascii")
                used = sum(worker.cpu_times().user + worker.cpu_times().system for worker in workers)
                forming.append((time.monotonic(), used))
        times, rss = watched.cpu_times(), watched.memory_info().rss
        answered = json.loads(processes[2].stdout.read() or b"null")
        assert processes[1].stdout is not None
        reporting = json.loads(processes[1].stdout.readline() or b"0")
        if answered is None:
            raise SystemExit(
                f"the last node has ended; the scheduler says: {log.read_text(encoding='utf-8')}"
            )
        ended = time.monotonic()
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in psutil.Process(process.pid).children():  # else it goes on with what it forms
                    worker.kill()
            process.kill()
            process.wait()
    begun = ended - options.seconds
    at = [
        moment - begun
        for (moment, used), (_, before) in zip(forming[1:], forming, strict=False)
        if used > before + 0.02
    ]
    during = [took for asked, took in answered if any(abs(asked - moment) < 0.5 for moment in at)]
    text = log.read_text(encoding="utf-8")
    return {
        "nodes": options.nodes,
        "links_reported_a_second": round(options.links * reporting),
        "asks_a_second": options.asks,
        "answers": _quantiles([took for _, took in answered]),
        "answers_while_forming": _quantiles(during),
        "longest_ms": sorted((round(took, 1), round(asked, 1)) for asked, took in answered)[-12:],
        "forming_cpu_s": forming[-1][1],
        "scheduler_cpu_s": times.user + times.system,
        "scheduler_rss": rss,
        "formed_in_s": [float(one) for one in re.findall(r"formed in ([\d.]+) s", text)],
        "first": options.first,
        "machine": machine,
    }


def _favour(pid: int) -> None:
    """Give all threads of a process real-time priority, and none of its children."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    if not ordered:
        return {"count": 0}
    parts = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "most_ms": 1.0}
    return {"count": len(ordered)} | {
        name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] for name, part in parts.items()
    }


def main() -> None:
    """Run a scheduler and its nodes, and print how soon it answered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=number, default=512)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--links", type=number, default=16, help="reported by each node a second")
    parser.add_argument("--asks", type=float, default=50.0, help="of the last node, a second")
    parser.add_argument("--topology", default="packing")
    parser.add_argument("--first", action="store_true", help="see above; needs root")
    parser.add_argument("--json", type=writable, metavar="FILE")
    parser.add_argument("--play", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        port, first, end, asks = options.play
        ranks = range(int(first), int(end))
        play(int(port), ranks, options, asks=float(asks))
        return
    with tempfile.TemporaryDirectory(prefix="netstorm-answers-") as name:
        found = measure(options, Path(name))
    for what, times in (("in all", found["answers"]), ("while forming", found["answers_while_forming"])):
        if times["count"]:
            print(
                f"{what}: {times['count']} answers within {times['p50_ms']:.1f} ms (median), "
                f"{times['p99_ms']:.1f} (p99), {times['most_ms']:.0f} (most)"
            )
    print(
        f"the scheduler took {found['scheduler_cpu_s']:.0f} s of a processor and "
        f"{found['scheduler_rss'] / 1e6:.0f} MB, forming {found['forming_cpu_s']:.0f} s; policies formed in "
        f"{found['formed_in_s']} s"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

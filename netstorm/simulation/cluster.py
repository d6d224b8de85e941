"""A whole job in one process: real general nodes and the real scheduler on virtual time, over a virtual
network.

    cluster = SimulatedCluster(nodes=4, seed=7)
    sums = cluster.allreduce("w", [np.full(10, rank) for rank in range(4)])
    assert all((total == 6).all() for total in sums)

Everything that happens is decided by the arguments and the seed; `digest` tells whether two runs were the
same. The only things that are not real are the network, the clocks and the training programs.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Protocol

import numpy as np

from netstorm.errors import FrameError, UsageError, WaitTimeout
from netstorm.protocol.frames import Buffer, open_frames
from netstorm.protocol.ids import SCHEDULER
from netstorm.pslite.clock.virtual_time import Timeline
from netstorm.pslite.van.link_model import FixedDelay, LinkModel
from netstorm.pslite.van.memory_network import MemoryNetwork
from netstorm.scheduler.log.records import MAGIC
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.initial_policy import first_policy, initial_assumptions
from netstorm.settings import Settings
from netstorm.simulation.node import Array, Pending, SimulatedNode
from netstorm.simulation.process import LocalClock, SimulatedProcess
from netstorm.simulation.starting import Starter, host_of
from netstorm.simulation.timekeeping import Timekeepers
from netstorm.simulation.virtual_network import VirtualNetwork
from netstorm.topology.networks.network import Link, Network, Node
from netstorm.topology.policy import Policy

__all__ = ["Scheduled", "SimulatedCluster"]

_ANY_RATE: Final = 100e6
"""Of links that are assumed to be equal, in bit/s."""

_LAST_MESSAGES: Final = 40
"""How many of the last messages an error shows."""


class Scheduled(Protocol):
    """Something that will happen to a cluster, such as the faults of `netstorm.testing.faults`."""

    def schedule(self, cluster: Any) -> None:
        """Arrange for it."""


class SimulatedCluster:
    """A job of `nodes` general nodes and a scheduler, and what happens to it.

    Attributes:
        nodes: by the rank that each asks for.
        timeline: virtual time; `now` counts from the cluster's start.
        network: the connections, for what the methods here don't offer.
    """

    def __init__(
        self,
        nodes: int,
        *,
        seed: int = 0,
        network: Network | None = None,
        policy: Policy | None = None,
        faults: Iterable[Scheduled] = (),
        start_at: Mapping[int, float] | None = None,
        delay_s: float = 0.001,
        jitter_s: float = 0.0,
        detect_s: float = 3.0,
        clocks: Callable[[int], LocalClock] | None = None,
        tcp: Literal["ideal", "reno"] = "ideal",
        forming_s: float = 0.5,
        keep_log: bool = False,
        keep_time: bool = False,
        knows_links: bool = True,
        **settings: object,
    ) -> None:
        """Set up a cluster; nothing happens before time passes.

        Args:
            nodes: how many.
            seed: of everything random: identities, clocks, jitter, losses.
            network: links with capacities, by rank. None: every message takes `delay_s` and up to `jitter_s`
            more. policy: what the job begins under. None: what the settings' topology makes of the network.
            faults: what goes wrong. start_at: when a rank's process (or the `SCHEDULER`) starts, if not at
            once. delay_s: see `network`. jitter_s: see `network`. detect_s: how long until a silent path
            counts as broken. clocks: each rank's clock (-1: the scheduler's). None: random origins, and
            drifts up to 50 ppm. tcp: "ideal" or "reno", see `VirtualNetwork`. forming_s: how long it is said
            to take to form a policy. keep_log: the scheduler keeps one, so that it can be started again after
            a crash. keep_time: clocks are synchronised by SNTP, as `clock_source` says, instead of being as
            wrong as `clocks` says for good. settings: of all processes, by attribute of `Settings`. Unless
            they say `awareness=True`, the scheduler knows the network as it is at its start, and the first
            policy stays. With it, it knows which nodes have links, or what `network_file` says, and measures.
            knows_links: if not, it takes all nodes for joined by links of their own, as a scheduler that is
            told nothing does (with `awareness=True`; all pairs of nodes must be able to talk).
        """
        if network is not None and network.size != nodes:
            raise UsageError(f"a network of {network.size} nodes for a cluster of {nodes}")
        self.size: Final = nodes
        self.settings: Final = Settings.from_environment(
            {}, num_workers=nodes, **{"awareness": False, "topology": "fapt", **settings}
        )
        self.timeline: Final = Timeline()
        self._seed: Final = seed
        model: LinkModel
        if network is None:
            model = FixedDelay(self.timeline, delay_s=delay_s, jitter_s=jitter_s, seed=seed)
        else:
            ranks = {host_of(rank): rank for rank in network.ranks}
            model = VirtualNetwork(self.timeline, network, ranks, tcp=tcp)
        self.link_model: Final = model
        self.network: Final = MemoryNetwork(self.timeline, model, seed=seed, detect_s=detect_s)
        self.network.watch = self._watch
        self._starter: Final = Starter(
            self.network,
            self.settings,
            seed=seed,
            clocks=clocks,
            keep_time=Timekeepers(self.network, seed=seed) if keep_time else None,
        )
        self._forming_s: Final = forming_s
        self.log: Final = bytearray(MAGIC) if keep_log else None
        """What the scheduler has written down; None: it writes nothing."""
        self._assumed: Final = _assumed(self.settings, network if knows_links else None, delay_s)
        self.policy: Final = policy or first_policy(self._assumed, version=0)
        self._digest = hashlib.blake2b(digest_size=16)
        self._last: deque[tuple[float, str, str, bytes]] = deque(maxlen=_LAST_MESSAGES)
        self._scheduler: SimulatedProcess[SchedulerMachine] | None = None
        self._nodes: dict[int, SimulatedNode] = {}
        starts = dict(start_at or {})
        for rank in (int(SCHEDULER), *range(nodes)):
            self.at(starts.get(rank, 0.0), lambda rank=rank: self.start(rank))  # type: ignore[misc]
        for fault in faults:
            fault.schedule(self)

    # ---------------------------------------------------------------------------------------------- its parts

    @property
    def now(self) -> float:
        """Virtual s since the cluster's start."""
        return self.timeline.now

    @property
    def nodes(self) -> Sequence[SimulatedNode]:
        """All nodes, by rank. It is an error to look before they all have started."""
        missing = [rank for rank in range(self.size) if rank not in self._nodes]
        if missing:
            raise UsageError(f"ranks {missing} have not started at {self.now:g} s")
        return [self._nodes[rank] for rank in range(self.size)]

    def started(self, rank: int) -> SimulatedNode:
        """Return one node.

        Raises:
            UsageError: it has not started.
        """
        if rank not in self._nodes:
            raise UsageError(f"rank {rank} has not started at {self.now:g} s")
        return self._nodes[rank]

    @property
    def scheduler(self) -> SimulatedProcess[SchedulerMachine]:
        """The scheduler's process."""
        if self._scheduler is None:
            raise UsageError(f"the scheduler has not started at {self.now:g} s")
        return self._scheduler

    @property
    def living(self) -> list[SimulatedNode]:
        """The nodes whose processes run."""
        return [node for _, node in sorted(self._nodes.items()) if node.alive]

    # --------------------------------------------------------------------------------------------- running it

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time (now, if that is past)."""
        self.timeline.at(time, action)

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)

    def run_until(self, wanted: Callable[[], bool], limit_s: float, what: str = "what was wanted") -> None:
        """Let virtual time pass until `wanted` holds.

        Raises:
            WaitTimeout: it does not after `limit_s`; says what every process waits for, and what was sent
            last.
        """
        if not self.timeline.run_until(wanted, self.timeline.now + limit_s):
            raise WaitTimeout(f"{limit_s:g} virtual s have not brought {what}\n{self.describe()}")

    def run_until_ended(self, pending: Iterable[Pending], limit_s: float = 60.0) -> None:
        """Let virtual time pass until all of `pending` have ended, well or not.

        Raises:
            WaitTimeout: they have not after `limit_s`; says what every process waits for.
        """
        left = list(pending)

        def ended() -> bool:
            while left and left[-1].ended:
                left.pop()
            return not left

        self.run_until(ended, limit_s, "the end of everything that was asked for")

    def join(self, limit_s: float = 60.0) -> SimulatedCluster:
        """Run until all nodes are members of the job.

        Raises:
            WaitTimeout: they are not after `limit_s`.
            NetStormError: why a node could not join.
        """
        self.run_until(lambda: len(self._nodes) == self.size, limit_s, "the start of all nodes")
        joined = [node.joined for node in self.nodes]
        self.run_until_ended(joined, limit_s)
        _raise_first(joined)
        return self

    def allreduce(
        self, name: str, values: Sequence[Any], *, priority: int = 0, limit_s: float = 60.0
    ) -> list[Array]:
        """Sum one array of each rank; return what each rank got. The nodes join first, if they have not.

        Raises:
            WaitTimeout: the sum is not there after `limit_s`.
            NetStormError: why there is none.
        """
        self.join(limit_s)
        pending = [
            node.push(name, np.asarray(value), priority=priority)
            for node, value in zip(self.nodes, values, strict=True)
        ]
        self.run_until_ended(pending, limit_s)
        return [one.result() for one in pending]

    def finish(self, limit_s: float = 60.0) -> None:
        """End the job in good order: all nodes finish, and the scheduler ends.

        Raises:
            WaitTimeout: it has not ended after `limit_s`.
            NetStormError: why a node could not finish.
        """
        pending = [node.finish() for node in self.living]
        self.run_until_ended(pending, limit_s)
        _raise_first(pending)
        self.run_until(lambda: self.scheduler.machine.outcome is not None, limit_s, "the scheduler's end")

    def install_policy(self, policy: Policy) -> None:
        """Let the scheduler change over to a policy, now."""
        self.scheduler.call(lambda _: self.scheduler.machine.install_policy(policy))

    # ------------------------------------------------------------------------------------- what is done to it

    def start(self, rank: int) -> None:
        """Start a rank's process, or the scheduler's; also again, after a crash, as a new process."""
        if rank == SCHEDULER:
            self._scheduler = self._starter.scheduler(
                self.policy, self._assumed, self._forming_s, log=self.log
            )
        else:
            self._nodes[rank] = self.start_another(rank, host_of(rank))

    def start_another(self, rank: int, host: str) -> SimulatedNode:
        """Start a process that asks for the same rank as another one; it is none of `nodes`."""
        return SimulatedNode(rank, self.timeline, self._starter.node(rank, host))

    def crash(self, rank: int, *, silent: bool = False) -> None:
        """Kill a process; `silent`: its host loses power, so nobody is told."""
        self._process(rank).die(silent=silent)

    def reset(self, source: int, target: int) -> None:
        """Break all connections between two processes, losing what is in flight. They may connect again."""
        self.network.reset(host_of(source), host_of(target))

    def cut(self, source: int, target: int, *, one_way: bool = False) -> None:
        """Swallow everything between two processes from now on."""
        self.network.cut(host_of(source), host_of(target), one_way=one_way)

    def heal(self, source: int, target: int) -> None:
        """End a cut."""
        self.network.heal(host_of(source), host_of(target))

    def delay(self, source: int, target: int, seconds: float) -> None:
        """Add a delay to everything from one process to another."""
        self.network.extra_delay_s[host_of(source), host_of(target)] = seconds

    def set_corruption(self, probability: float) -> None:
        """Change a bit of each payload with this probability."""
        self.network.corrupt_probability = probability

    def set_breaks(self, probability: float) -> None:
        """Break a connection instead of delivering a message, with this probability."""
        self.network.break_probability = probability

    # ------------------------------------------------------------------------------------------ looking at it

    def traffic(self, source: int, target: int) -> int:
        """Return the bytes that one process got from another so far."""
        return self.network.traffic.get((host_of(source), host_of(target)), (0, 0))[0]

    def digest(self) -> str:
        """Return a digest of every message so far: when, whence, whither, what."""
        return self._digest.hexdigest()

    def describe(self) -> str:
        """Say how each process is and what it waits for, and what was sent last."""
        lines = [f"at {self.now:.3f} s, seed {self._seed}:"]
        if self._scheduler is not None:
            alive = "" if self._scheduler.alive else "dead; it was: "
            text = self._scheduler.machine.status_text()
            lines.append(f"  scheduler: {alive}{text}")
        for rank in range(self.size):
            node = self._nodes.get(rank)
            lines.append("  " + (node.describe() if node is not None else f"rank {rank} has not started"))
        lines.append("the last messages:")
        lines += [
            f"  {time:.6f} {source} > {target}: {_readable(header)}"
            for time, source, target, header in self._last
        ]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- inside

    def _process(self, rank: int) -> SimulatedProcess[Any]:
        if rank == SCHEDULER:
            return self.scheduler
        return self.started(rank).process

    def _watch(self, source: str, target: str, header: bytes, payload: Buffer | None) -> None:
        # the header holds the payload's checksum
        self._digest.update(struct.pack("<d", self.timeline.now))
        self._digest.update(f"{source}>{target}".encode())
        self._digest.update(header)
        self._last.append((self.timeline.now, source, target, header))


def _assumed(settings: Settings, network: Network | None, delay_s: float) -> InitialAssumptions:
    """Return what a scheduler takes this network for."""
    found = initial_assumptions(settings)
    if settings.network_file:
        return found
    if network is None:
        return replace(found, network=Network.uniform(settings.num_workers, latency=delay_s))
    if not settings.awareness:
        return replace(found, network=network, known=True, described=True)
    links = tuple(Link(source=link.source, target=link.target, rate=_ANY_RATE) for link in network.links)
    nodes = tuple(Node(rank=node.rank, site=node.site) for node in network.nodes)
    return replace(found, network=replace(network, nodes=nodes, links=links, changes=()), described=True)


def _raise_first(pending: Iterable[Pending]) -> None:
    for one in pending:
        if one.error is not None:
            raise one.error


def _readable(header: bytes) -> str:
    for frames in (1, 2):
        try:
            opened = open_frames(header, frames)
        except FrameError:
            continue
        number = f" #{opened.sequence}" if opened.sequence else ""
        return f"{opened.message!r}{number}"
    return f"{len(header)} bytes that are no frame"

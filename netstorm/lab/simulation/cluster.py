"""A whole job in one process: real nodes and the real scheduler, on virtual time and a virtual network.

    cluster = SimulatedCluster(nodes=4, seed=7)
    sums = cluster.allreduce("w", [np.full(10, rank) for rank in range(4)])
    assert all((total == 6).all() for total in sums)

The arguments and the seed decide everything that happens; two runs with the same `digest` were the same. Only
the network, the clocks and the training programs are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError, WaitTimeout
from netstorm.kvstore.node import GeneralNode
from netstorm.lab.simulation.memory_network import FixedDelay, LinkModel, MemoryNetwork, Timeline
from netstorm.lab.simulation.network import MessageLog, VirtualNetwork
from netstorm.lab.simulation.node import Array, Pending, SimulatedNode
from netstorm.lab.simulation.packets import PacketFaults, PacketNetwork
from netstorm.lab.simulation.process import (
    Datagrams,
    LocalClock,
    ProcessFactory,
    SimulatedProcess,
    SimulatedTraffic,
    host_of,
)
from netstorm.protocol.frames import SCHEDULER
from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies import InitialAssumptions, first_policy, initial_assumptions
from netstorm.scheduler.replay_log import MAGIC
from netstorm.scheduler.several_jobs import SeveralJobs
from netstorm.scheduler.standby import StandbyMachine
from netstorm.scheduler.status import JobStatus
from netstorm.settings import Settings
from netstorm.topology.network import Link, Network, Rank
from netstorm.topology.policy import Policy

__all__ = ["Scheduled", "SimulatedCluster", "SimulatedJobs"]


# Virtual time and one network for simulated processes: what one job and several jobs have in common.


class Simulation:
    """A timeline and a network, and how virtual time passes.

    Attributes:
        timeline: virtual time, in s since the start.
        network: the connections between processes.
        link_model: how long messages take.
    """

    def __init__(
        self,
        network: Network | None,
        hosts: Mapping[str, Rank],
        *,
        seed: int,
        delay_s: float,
        jitter_s: float,
        detect_s: float = 3.0,
        tcp: Literal["ideal", "reno"] = "ideal",
    ) -> None:
        """Begin at time 0, without processes.

        Args:
            network: links with capacities. None: each message takes `delay_s` and up to `jitter_s` more.
            hosts: the node of `network` at which a host is.
            seed: of jitter and losses.
            delay_s: see `network`.
            jitter_s: see `network`.
            detect_s: time until a silent path counts as broken.
            tcp: see `VirtualNetwork`.
        """
        self.timeline: Final = Timeline()
        model: LinkModel
        if network is None:
            model = FixedDelay(self.timeline, delay_s=delay_s, jitter_s=jitter_s, seed=seed)
        else:
            model = VirtualNetwork(self.timeline, network, hosts, tcp=tcp)
        self.link_model: Final = model
        self.network: Final = MemoryNetwork(self.timeline, model, seed=seed, detect_s=detect_s)

    @property
    def now(self) -> float:
        """Virtual s since the start."""
        return self.timeline.now

    def describe(self) -> str:
        """Return the state of the processes as text, for error messages."""
        raise NotImplementedError

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time, or now if that time has passed."""
        self.timeline.at(time, action)

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)

    def run_until(
        self, wanted: Callable[[], bool], limit_s: float = 60.0, what: str = "what was wanted"
    ) -> None:
        """Let virtual time pass until `wanted` returns True.

        Raises:
            WaitTimeout: it did not within `limit_s`; the message describes all processes.
        """
        if not self.timeline.run_until(wanted, self.timeline.now + limit_s):
            raise WaitTimeout(f"{limit_s:g} virtual s have not brought {what}\n{self.describe()}")

    def run_until_ended(self, pending: Iterable[Pending], limit_s: float = 60.0) -> None:
        """Let virtual time pass until all of `pending` have completed, with a result or an error.

        Raises:
            WaitTimeout: they have not within `limit_s`; the message describes all processes.
        """
        left = list(pending)

        def ended() -> bool:
            while left and left[-1].ended:
                left.pop()
            return not left

        self.run_until(ended, limit_s, "the end of all operations")


_ANY_RATE: Final = 100e6
"""Rate of links that are assumed to be equal, in bit/s."""


class Scheduled(Protocol):
    """Something that will happen to a cluster, such as the faults of `netstorm.lab.testing.faults`."""

    def schedule(self, cluster: ClusterFaults, /) -> None:
        """Enter it in the cluster's timeline."""


class SimulatedCluster(Simulation):
    """A job of `nodes` general nodes and a scheduler. Nothing happens before virtual time passes.

    Unless the settings say `awareness=True`, the scheduler knows the network as it is at its start, and the
    first policy stays. With `awareness=True` it knows which nodes have links, or what `network_file` says,
    and measures.

    Args:
        nodes: number of general nodes.
        seed: of everything random: identities, clocks, jitter, losses.
        network: links with capacities, by rank. None: each message takes `delay_s` and up to `jitter_s` more.
        policy: the first policy. None: what the settings' topology makes of the network.
        faults: what goes wrong.
        start_at: when the process of a rank, or of the `SCHEDULER`, starts, if not at once.
        delay_s: see `network`.
        jitter_s: see `network`.
        detect_s: time until a silent path counts as broken.
        clocks: each rank's clock (-1: the scheduler's). None: random origins, and drifts up to 50 ppm.
        tcp: "ideal" or "reno", see `VirtualNetwork`.
        forming_s: virtual time that it takes to form a policy.
        keep_log: the scheduler keeps a log, so that it can be started again after a crash.
        sync_clocks: clocks are synchronised by SNTP, as `clock_source` says. If not, their error stays as
            `clocks` says.
        knows_links: if not, the scheduler assumes equal links between all nodes, as without a network file
            (with `awareness=True`; all pairs of nodes must be able to talk).
        packet_faults: what happens to datagrams.
        settings: of all processes, by attribute of `Settings`.

    Attributes:
        nodes: by the rank that each asks for.
        faults: makes processes and connections fail.
        policy: the first policy.
        packets: carries the datagrams.
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
        sync_clocks: bool = False,
        knows_links: bool = True,
        packet_faults: PacketFaults | None = None,
        **settings: object,
    ) -> None:
        """Set up the cluster; see the class for the arguments."""
        if network is not None and network.size != nodes:
            raise UsageError(f"a network of {network.size} nodes for a cluster of {nodes}")
        hosts = {} if network is None else {host_of(rank): rank for rank in network.ranks}
        super().__init__(
            network, hosts, seed=seed, delay_s=delay_s, jitter_s=jitter_s, detect_s=detect_s, tcp=tcp
        )
        self.size: Final = nodes
        self.settings: Final = Settings.from_environment(
            {}, num_workers=nodes, **{"awareness": False, "topology": "fapt", **settings}
        )
        self._seed: Final = seed
        self._messages: Final = MessageLog(self.timeline)
        self.network.watch = lambda source, target, header, _: self._messages.record(source, target, header)
        datagrams = Datagrams(self.network) if sync_clocks else None
        self.packets: Final = PacketNetwork(self.network, packet_faults, seed=seed)
        self._factory: Final = ProcessFactory(
            self.network, self.settings, seed=seed, clocks=clocks, datagrams=datagrams, packets=self.packets
        )
        self._forming_s: Final = forming_s
        self.log: Final = bytearray(MAGIC) if keep_log else None
        """The scheduler's log; None: it keeps none."""
        self._assumed: Final = _assumed(self.settings, network if knows_links else None, delay_s)
        self.policy: Final = policy or first_policy(self._assumed, version=0)
        self._scheduler: SimulatedProcess[SchedulerMachine] | None = None
        self._nodes: dict[int, SimulatedNode] = {}
        starts = dict(start_at or {})
        for rank in (int(SCHEDULER), *range(nodes)):
            self.at(starts.get(rank, 0.0), partial(self.start, rank))
        self.faults: Final = ClusterFaults(self.network, self._process)
        for fault in faults:
            fault.schedule(self.faults)

    # -------------------------------------------------------------------------------------------------- parts

    @property
    def nodes(self) -> Sequence[SimulatedNode]:
        """All nodes, by rank.

        Raises:
            UsageError: some have not started.
        """
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
        """The scheduler's process.

        Raises:
            UsageError: it has not started.
        """
        if self._scheduler is None:
            raise UsageError(f"the scheduler has not started at {self.now:g} s")
        return self._scheduler

    @property
    def living(self) -> list[SimulatedNode]:
        """The nodes whose processes are alive."""
        return [node for _, node in sorted(self._nodes.items()) if node.alive]

    def is_member(self, node: SimulatedNode) -> bool:
        """Return whether a process is in the job now, as the scheduler says."""
        job = self.scheduler.machine.members
        member = job[node.rank] if node.rank < len(job) else None
        return member is not None and member.incarnation == node.process.stack.endpoint.process.incarnation

    # ------------------------------------------------------------------------------------------------ running

    def join(self, limit_s: float = 60.0) -> SimulatedCluster:
        """Let virtual time pass until all nodes are members of the job.

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
        self, name: str, values: Sequence[npt.ArrayLike], *, priority: int = 0, limit_s: float = 60.0
    ) -> list[Array]:
        """Sum one array of each rank, and return each rank's result. The nodes join first, if they have not.

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
        """End the job: all nodes finish, then the scheduler ends.

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
        self.scheduler.call(lambda now: self.scheduler.machine.install(policy, now))

    def watch(self, every_s: float, see: Callable[[JobStatus], None]) -> None:
        """Call `see` with the job's status each `every_s` virtual seconds, and change nothing."""

        def look() -> None:
            if self._scheduler is not None and self._scheduler.alive:
                snapshot = self._scheduler.machine.snapshot(self._scheduler.now())
                see(build_status(snapshot, time=self.now, scheduler="simulated"))
            self.at(self.now + every_s, look)

        self.at(self.now, look)

    # ---------------------------------------------------------------------------------------------- processes

    def start(self, rank: int) -> None:
        """Start the process of a rank, or of the scheduler; after a crash, start a new one."""
        if rank == SCHEDULER:
            self._scheduler = self._factory.scheduler(
                self.policy, self._assumed, self._forming_s, log=self.log
            )
        else:
            self._nodes[rank] = self.start_another(rank, host_of(rank))

    def start_standby(self, host: str, peers: Iterable[int] = ()) -> SimulatedProcess[StandbyMachine]:
        """Start a standby scheduler on a host that NETSTORM_STANDBYS names; with `peers`, on one that no node
        knows: it takes the job over from these ranks.
        """
        asked = [self.started(rank).process.machine.options for rank in peers]
        peer_addresses = [(one.host, one.port) for one in asked]
        return self._factory.standby(host, self._assumed, self._forming_s, peers=peer_addresses)

    def start_another(self, rank: int, host: str) -> SimulatedNode:
        """Start another process that asks for a rank that is taken. It is not among `nodes`."""
        return SimulatedNode(rank, self.timeline, self._factory.node(rank, host))

    # ------------------------------------------------------------------------------------------------ reports

    def traffic(self, source: int, target: int) -> int:
        """Return the bytes that one process has received from another so far."""
        return self.network.traffic.get((host_of(source), host_of(target)), (0, 0))[0]

    def digest(self) -> str:
        """Return a digest of all messages so far: equal digests mean equal runs."""
        return self._messages.digest()

    def describe(self) -> str:
        """Return the state of each process, what it waits for, and the last messages."""
        lines = [f"at {self.now:.3f} s, seed {self._seed}:"]
        if self._scheduler is not None:
            alive = "" if self._scheduler.alive else "dead; it was: "
            text = self._scheduler.machine.status_text()
            lines.append(f"  scheduler: {alive}{text}")
        for rank in range(self.size):
            node = self._nodes.get(rank)
            lines.append("  " + (node.describe() if node is not None else f"rank {rank} has not started"))
        lines.append("the last messages:")
        lines += [f"  {line}" for line in self._messages.last()]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- inside

    def _process(self, rank: int) -> AnyProcess:
        if rank == SCHEDULER:
            return self.scheduler
        return self.started(rank).process


def _assumed(settings: Settings, network: Network | None, delay_s: float) -> InitialAssumptions:
    """Return the scheduler's first estimate of this network."""
    found = initial_assumptions(settings)
    if settings.network_file:
        return found
    if network is None:
        return replace(found, network=Network.uniform(settings.places, latency=delay_s))
    if not settings.awareness:
        return replace(found, network=network, known=True, described=True)
    links = tuple(Link(source=link.source, target=link.target, rate=_ANY_RATE) for link in network.links)
    nodes = tuple(replace(node, egress=None, ingress=None) for node in network.nodes)
    return replace(found, network=replace(network, nodes=nodes, links=links, changes=()), described=True)


def _raise_first(pending: Iterable[Pending]) -> None:
    for one in pending:
        if one.error is not None:
            raise one.error


# Faults of a simulated cluster: crashes, cuts, delays and corruption. A new kind of fault belongs here.
#
# `netstorm.lab.testing.faults` has the same faults as values, for plans.

AnyProcess: TypeAlias = SimulatedProcess[SchedulerMachine] | SimulatedProcess[GeneralNode]


class ClusterFaults:
    """Makes things fail, at once. Ends are ranks, or `SCHEDULER`."""

    def __init__(self, network: MemoryNetwork, process_of: Callable[[int], AnyProcess]) -> None:
        """Begin without a fault.

        Args:
            network: between the processes.
            process_of: returns the process of a rank, or of the scheduler.
        """
        self._network: Final = network
        self._process_of: Final = process_of

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time, or now if that time has passed."""
        self._network.timeline.at(time, action)

    def crash(self, rank: int, *, silent: bool = False) -> None:
        """Kill a process; if `silent`, its host loses power, so that no connection is reset."""
        self._process_of(rank).die(silent=silent)

    def suspend(self, rank: int, seconds: float) -> None:
        """Stop a process for a while, as SIGSTOP and SIGCONT do, or C code that keeps the interpreter lock.
        Its host's kernel keeps its connections, and acknowledges what comes.
        """
        process = self._process_of(rank)
        process.suspend()
        self._network.timeline.after(seconds, process.go_on)

    def reset(self, source: int, target: int) -> None:
        """Break all connections between two processes, with what is in flight. They may connect again."""
        self._network.reset(host_of(source), host_of(target))

    def cut(self, source: int, target: int, *, one_way: bool = False) -> None:
        """Drop everything between two processes from now on."""
        self._network.cut(host_of(source), host_of(target), one_way=one_way)

    def heal(self, source: int, target: int) -> None:
        """End a cut."""
        self._network.heal(host_of(source), host_of(target))

    def delay(self, source: int, target: int, seconds: float) -> None:
        """Add a delay to everything from one process to another."""
        self._network.extra_delay_s[host_of(source), host_of(target)] = seconds

    def set_corruption(self, probability: float) -> None:
        """Change a bit of each payload with this probability."""
        self._network.corrupt_probability = probability

    def set_breaks(self, probability: float) -> None:
        """Break a connection instead of delivering a message, with this probability."""
        self._network.break_probability = probability


# Several jobs and their scheduler in one process, on virtual time; `cluster` does the same for one job.


class _TrafficFrom:
    """`HostTraffic` of a process of one of several jobs."""

    def __init__(self, jobs: SimulatedJobs, host: str, priority: int) -> None:
        self._jobs: Final = jobs
        self._host: Final = host
        self._priority: Final = priority

    def towards(self, host: str) -> SimulatedTraffic:
        """See `HostTraffic`."""
        table = self._jobs.traffic_between(self._host, host)
        return SimulatedTraffic(table, self._host, self._priority, self._jobs.timeline)


class SimulatedJobs(Simulation):
    """A scheduler of several jobs, and their nodes.

    Attributes:
        scheduler: its process.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        network: Network | None = None,
        hosts: Mapping[str, Rank] | None = None,
        delay_s: float = 0.001,
        jitter_s: float = 0.0,
        forming_s: float = 0.5,
        **settings: object,
    ) -> None:
        """Start the scheduler.

        Args:
            seed: of everything random.
            network: links with capacities. None: every message takes `delay_s` and up to `jitter_s` more.
            hosts: the node of `network` at which a host (`host_of`) is; several hosts may share one.
            delay_s: see `network`.
            jitter_s: see `network`.
            forming_s: virtual time that it takes to form a policy.
            settings: the scheduler's, by attribute of `Settings`.
        """
        self._seed: Final = seed
        self._given: Final = settings
        own = Settings.from_environment({}, **{"jobs": 0, "topology": "fapt", **settings})
        super().__init__(network, hosts or {}, seed=seed, delay_s=delay_s, jitter_s=jitter_s)
        self._started = 0
        self._places: Final = dict(hosts or {})
        self._traffic: Final[dict[tuple[Rank | str, Rank | str], dict[str, tuple[int, float]]]] = {}
        """By places of both ends: see `SimulatedTraffic`."""
        self._jobs: Final[dict[str, Settings]] = {}
        """The settings of the last job of each name."""
        factory = ProcessFactory(self.network, own, seed=seed)
        self.scheduler: Final[SimulatedProcess[SeveralJobs]] = factory.several_jobs(forming_s)

    @staticmethod
    def host_of(job: str, rank: int) -> str:
        """Return the name of the host of a job's rank."""
        return f"{job}-node{rank}"

    def start(self, job: str, nodes: int, **settings: object) -> list[SimulatedNode]:
        """Start the nodes of a job, and return them by rank. The name may have been used before.

        `settings` are the nodes' own, besides the heartbeat settings of the scheduler.
        """
        own = self._settings_of(job, nodes, settings)
        self._jobs[job] = own
        return self._start(own, range(nodes))

    def start_more(self, job: str, ranks: Iterable[int]) -> list[SimulatedNode]:
        """Start nodes of an elastic job that has begun, at the places of nodes that have died."""
        return self._start(self._jobs[job], ranks)

    def traffic_between(self, source: str, target: str) -> dict[str, tuple[int, float]]:
        """Return what jobs with priorities tell each other of the link between two hosts."""
        places = self._places.get(source, source), self._places.get(target, target)
        return self._traffic.setdefault(places, {})

    def _settings_of(self, job: str, nodes: int, settings: Mapping[str, object]) -> Settings:
        common = {name: value for name, value in self._given.items() if name.startswith("heartbeat")}
        return Settings.from_environment({}, **{**common, "job": job, "num_workers": nodes, **settings})

    def _start(self, own: Settings, ranks: Iterable[int]) -> list[SimulatedNode]:
        self._started += 1
        factory = ProcessFactory(
            self.network,
            own,
            seed=_seed_of(self._seed, self._started),
            traffic=(lambda host: _TrafficFrom(self, host, own.job_priority)) if own.job_priority else None,
        )
        return [
            SimulatedNode(rank, self.timeline, factory.node(rank, self.host_of(own.job, rank)))
            for rank in ranks
        ]

    def describe(self) -> str:
        """Return how the jobs are doing."""
        texts = [machine.status_text() for machine in self.scheduler.machine.jobs]
        return "\n".join((f"seed {self._seed}:", *(texts or ["no job is here"])))


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the `number`-th job."""
    return seed * 1_000_003 + number

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
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError
from netstorm.protocol.frames import SCHEDULER
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies import InitialAssumptions, first_policy, initial_assumptions
from netstorm.scheduler.replay_log import MAGIC
from netstorm.scheduler.standby import StandbyMachine
from netstorm.settings import Settings
from netstorm.simulation.clock_sync import Datagrams
from netstorm.simulation.cluster_faults import AnyProcess, ClusterFaults
from netstorm.simulation.local_clock import LocalClock
from netstorm.simulation.network.message_log import MessageLog
from netstorm.simulation.node import SimulatedNode
from netstorm.simulation.pending import Array, Pending
from netstorm.simulation.process import SimulatedProcess
from netstorm.simulation.process_factory import ProcessFactory, host_of
from netstorm.simulation.simulation import Simulation
from netstorm.topology.network import Link, Network, Node
from netstorm.topology.policy import Policy

__all__ = ["Scheduled", "SimulatedCluster"]

_ANY_RATE: Final = 100e6
"""Rate of links that are assumed to be equal, in bit/s."""


class Scheduled(Protocol):
    """Something that will happen to a cluster, such as the faults of `netstorm.testing.faults`."""

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
        settings: of all processes, by attribute of `Settings`.

    Attributes:
        nodes: by the rank that each asks for.
        faults: makes processes and connections fail.
        policy: the first policy.
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
        datagrams = Datagrams(self.network, seed=seed) if sync_clocks else None
        self._factory: Final = ProcessFactory(
            self.network, self.settings, seed=seed, clocks=clocks, datagrams=datagrams
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
        job = self.scheduler.machine.view.members
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
        self.scheduler.call(lambda now: self.scheduler.machine.policies.install(policy, now))

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
            text = self._scheduler.machine.view.status_text()
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
    nodes = tuple(Node(rank=node.rank, site=node.site) for node in network.nodes)
    return replace(found, network=replace(network, nodes=nodes, links=links, changes=()), described=True)


def _raise_first(pending: Iterable[Pending]) -> None:
    for one in pending:
        if one.error is not None:
            raise one.error

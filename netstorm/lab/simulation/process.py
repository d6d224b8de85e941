"""The processes of a simulated cluster: real machines and sessions on an in-memory van and clocks of their
own, which SNTP over the virtual network synchronises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from netstorm import __version__
from netstorm.errors import FrameError
from netstorm.kvstore.membership import DriverStatus, time_server_address
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.options import NodeOptions, explicit_job_settings, lane_options, meter_options
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions
from netstorm.lab.simulation.memory_network import MemoryNetwork, MemoryVan, Timeline, Timer
from netstorm.lab.simulation.packets import PacketNetwork
from netstorm.observe.log import Counters
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite import sntp
from netstorm.pslite.datagram.lanes import Lanes
from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.pslite.sending import HostTraffic
from netstorm.pslite.session import Limits
from netstorm.pslite.sntp import Address, ClockSource, ClockSync
from netstorm.pslite.van import progress_by_peer
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import FormationRequest, InitialAssumptions
from netstorm.scheduler.policy_former import form
from netstorm.scheduler.replay_log import ReplayedJob, encode, read
from netstorm.scheduler.several_jobs import (
    FirstPolicyRequest,
    SeveralJobs,
    form_first_policy,
    network_file_nodes,
)
from netstorm.scheduler.standby import PeerInquiry, StandbyMachine
from netstorm.settings import Settings
from netstorm.topology.policy import Policy

__all__ = [
    "Datagrams",
    "LocalClock",
    "ProcessFactory",
    "SimulatedProcess",
    "SimulatedTraffic",
    "host_of",
]


# One process of a simulated cluster: a real machine and sessions, an in-memory van and a local clock.

M = TypeVar("M", bound=Machine)

_TICKS_AT_ONCE: Final = 1000
"""A machine that asks for more ticks than this without letting time pass is in an endless loop."""


class SimulatedProcess(Generic[M]):
    """Runs a stack whenever an event arrives or a tick is due, as the I/O thread of a real process does."""

    def __init__(self, timeline: Timeline, van: MemoryVan, clock: LocalClock, stack: Stack[M]) -> None:
        self.machine: Final[M] = stack.machine
        self.van: Final = van
        self.alive = True
        self._timeline: Final = timeline
        self._clock: Final = clock
        self.stack: Final = stack
        self.synced_clock: SyncedClock | None = None
        """Its estimate of the cluster clock, by SNTP; None: `clock` says what the error is."""
        self.suspended = False
        self._timer: Timer | None = None
        self._calls: Final[list[Callable[[float], None]]] = []
        """What the program calls once this process runs again."""
        self._awake = False
        self._ticks_at_once = 0
        self._ticked_at = -1.0
        self._shown = clock.local(timeline.now)
        self._stopped_at = 0.0
        van.notify = self.wake
        self.wake()

    def now(self) -> float:
        """Return the time that this process sees: its local clock, which never goes backwards, and stands
        still while it does not run.
        """
        local = self._clock.local(self._timeline.now)
        self._shown = max(self._shown, self.stack.running_time(local, local))
        return self._shown

    def call(self, function: Callable[[float], None]) -> None:
        """Call `function` with the present time, as this process's program would call into its machine."""
        if self.suspended:
            self._calls.append(function)
        elif self.alive:
            now = self.now()
            function(now)
            self._flush(now)

    def wake(self) -> None:
        """Handle the van's events, after everything else that happens at this virtual time."""
        if self.alive and not self._awake and not self.suspended:
            self._awake = True
            self._timeline.after(0.0, self._run)

    def die(self, *, silent: bool = False) -> None:
        """End as a killed process does; if `silent`, as one whose host loses power."""
        self.alive = False
        self.van.die(silent=silent)
        if self._timer is not None:
            self._timer.cancel()

    def suspend(self) -> None:
        """Stop running, as a process does that gets SIGSTOP. What comes for it waits."""
        self.suspended = True
        self._stopped_at = self._clock.local(self._timeline.now)

    def go_on(self) -> None:
        """Run again, as after SIGCONT: first what has come meanwhile is handled, then what is overdue."""
        self.suspended = False
        self.stack.running_time(self._clock.local(self._timeline.now), self._stopped_at)
        self.wake()
        calls, self._calls[:] = list(self._calls), []
        for function in calls:
            self._timeline.after(0.0, lambda function=function: self.call(function))  # type: ignore[misc]

    def _run(self) -> None:
        self._awake = False
        if not self.alive or self.suspended:
            return
        now = self.now()
        while events := self.van.poll(0.0):
            for event in events:
                self.stack.handle(event, now)
        self._flush(now)

    def _tick(self, due: float) -> None:
        if not self.alive or self.suspended:
            return
        self._timer = None
        self._ticks_at_once = self._ticks_at_once + 1 if self._timeline.now == self._ticked_at else 0
        self._ticked_at = self._timeline.now
        if self._ticks_at_once > _TICKS_AT_ONCE:
            raise AssertionError(f"{self.van.host} asks for the tick at {due} in an endless loop")
        self._shown = max(due, self._shown)  # rounding must not make the tick early
        now = self.now()
        self.stack.tick(now)
        self._flush(now)

    def _arm(self) -> None:
        """Set the timer to the stack's next tick."""
        if self._timer is not None:
            self._timer.cancel()
        due = self.stack.next_tick()
        local = due + self.stack.missed_s
        self._timer = self._timeline.at(self._clock.virtual(local), lambda: self._tick(due))

    def _flush(self, now: float) -> None:
        """Carry out the machine's instructions."""
        self.stack.flush(self.van, now)
        self._arm()


# The clock of a simulated host: an arbitrary origin, a drift, and an error against the cluster clock.


@dataclass(frozen=True, slots=True)
class LocalClock:
    """A host's monotonic clock, as a function of virtual time. Times in s."""

    offset_s: float = 0.0
    drift: float = 0.0
    """Seconds gained in a second; a quartz is good to about 5e-5."""
    sync_error_s: float = 0.0
    """Error of this host's estimate of the cluster clock, which stamps messages."""
    sync_drift: float = 0.0
    """Seconds by which that error grows in a second."""

    def local(self, time: float) -> float:
        """Return what this clock shows at a virtual time."""
        return time * (1.0 + self.drift) + self.offset_s

    def cluster(self, time: float) -> float:
        """Return this host's estimate of the cluster clock at a virtual time."""
        return time * (1.0 + self.sync_drift) + self.sync_error_s

    def virtual(self, local: float) -> float:
        """Return the virtual time at which this clock shows `local`."""
        return (local - self.offset_s) / (1.0 + self.drift)


# SNTP between simulated hosts: datagrams over the virtual network, and the clocks that they synchronise.
#
# Nodes ask the scheduler, or their parent in a tree. A datagram takes as long as a message in the network.

_FLOWS: Final = 1 << 40
"""Flow numbers from here on belong to datagrams. They are even, as those of data that leaves an opener."""

_BYTES: Final = sntp.PACKET_BYTES + 28
"""Bytes of a datagram, with the headers of UDP and IP."""

Answer: TypeAlias = Callable[[bytes], bytes | None]


class Datagrams:
    """SNTP requests and answers between the hosts of one cluster."""

    def __init__(self, network: MemoryNetwork) -> None:
        """Begin without traffic; `network` carries the datagrams."""
        self.timeline: Final = network.timeline
        self._network: Final = network
        self._flows: dict[tuple[str, str], int] = {}
        self._answers: dict[str, Answer] = {}

    def serve(self, host: str, answer: Answer) -> None:
        """Answer requests to `host` with this function; if it returns None, the request stays unanswered."""
        self._answers[host] = answer

    def serve_cluster_time(self, host: str, clock: LocalClock) -> None:
        """Answer requests to `host`, the scheduler's, by `clock`, which is the cluster clock."""

        def answer(data: bytes) -> bytes:
            now = clock.cluster(self.timeline.now)
            return sntp.answer(data, received=now, transmitted=now)

        self.serve(host, answer)

    def ask(self, source: str, target: str, request: bytes, receive: Callable[[bytes], None]) -> None:
        """Send a request to a host, and call `receive` with the answer, if one arrives."""

        def arrived() -> None:
            answer = self._answers.get(target)
            data = None if answer is None else answer(request)
            if data is not None:
                self._carry(target, source, lambda: receive(data))

        self._carry(source, target, arrived)

    def _carry(self, source: str, target: str, arrived: Callable[[], None]) -> None:
        flow = self._flows.setdefault((source, target), _FLOWS + 2 * len(self._flows))

        def late() -> None:
            self.timeline.after(self._network.extra_delay_s.get((source, target), 0.0), arrived)

        self._network.link_model.carry(flow, source, target, _BYTES, late)


class SyncedClock:
    """One host's estimate of the cluster clock, which is the clock of the scheduler's host."""

    def __init__(
        self,
        datagrams: Datagrams,
        host: str,
        clock: LocalClock,
        *,
        scheduler: Address,
        parent: Callable[[], Address | None],
        seed: int,
    ) -> None:
        """Send the first request at once.

        Args:
            datagrams: carries requests and answers.
            host: this clock's.
            clock: the host's own clock.
            scheduler: asked if `parent` returns None.
            parent: returns the address to ask.
            seed: of the random intervals between requests.
        """
        self.sync: Final = ClockSync(seed=seed)
        self._datagrams: Final = datagrams
        self._host: Final = host
        self._clock: Final = clock
        self._source: Final = ClockSource(scheduler)
        self._parent: Final = parent
        datagrams.serve(host, self._answer)
        datagrams.timeline.after(0.0, self._poll)

    def cluster(self) -> float:
        """Return this host's estimate of the cluster clock, now."""
        now = self._datagrams.timeline.now
        if not self.sync.synchronised:
            return self._clock.cluster(now)
        return self.sync.cluster_time(self._local())

    def error_bound(self) -> float:
        """Return the largest possible error of the estimate, in s."""
        return self.sync.error_bound(self._local())

    def with_clock(self, status: DriverStatus) -> DriverStatus:
        """Return a driver's status with the offset, drift and error of this clock."""
        known = self.sync.synchronised
        return replace(
            status,
            clock_offset=self.cluster() - self._clock.cluster(self._datagrams.timeline.now),
            clock_drift=self.sync.drift,
            clock_error=self.error_bound() if known else -1.0,
            clock_hops=self.sync.hops,
        )

    def _local(self) -> float:
        return self._clock.local(self._datagrams.timeline.now)

    def _poll(self) -> None:
        local = self._local()
        self._source.set_parent(self._parent())
        host, _ = self._source.next_server(local)
        self._datagrams.ask(self._host, host, self.sync.poll(local), self._receive)
        self._datagrams.timeline.at(self._clock.virtual(self.sync.next_poll()), self._poll)

    def _receive(self, data: bytes) -> None:
        try:
            self.sync.receive(data, self._local())
        except FrameError:
            return
        self._source.answered()

    def _answer(self, data: bytes) -> bytes:
        now = self.cluster()
        return sntp.answer(data, received=now, transmitted=now, hops=self.sync.hops, error=self.error_bound())


# Builds the processes of a simulated cluster: like real ones, but on an in-memory van and virtual clocks.

_SECRET: Final = SchedulerSecret(bytes(range(32)))
"""Of all schedulers; nodes are without a key unless the network is said to have one."""

S = TypeVar("S", SchedulerMachine, StandbyMachine, SeveralJobs)


def host_of(rank: int) -> str:
    """Return the host name of a rank, or of the scheduler."""
    return "scheduler" if rank == SCHEDULER else f"node{rank}"


class SimulatedTraffic:
    """`LinkTraffic` of one process; those of one place share a table: priority and end, by host."""

    def __init__(
        self, table: dict[str, tuple[int, float]], host: str, priority: int, timeline: Timeline
    ) -> None:
        self._table: Final = table
        self._host: Final = host
        self._priority: Final = priority
        self._timeline: Final = timeline

    def higher_s(self) -> float:
        """See `LinkTraffic`."""
        ends = (end for priority, end in self._table.values() if priority > self._priority)
        return max(0.0, max(ends, default=0.0) - self._timeline.now)

    def sends(self, seconds: float) -> None:
        """See `LinkTraffic`."""
        self._table[self._host] = self._priority, self._timeline.now + seconds


class ProcessFactory:
    """Starts processes on one network."""

    def __init__(
        self,
        network: MemoryNetwork,
        settings: Settings,
        *,
        seed: int,
        clocks: Callable[[int], LocalClock] | None = None,
        datagrams: Datagrams | None = None,
        traffic: Callable[[str], HostTraffic] | None = None,
        packets: PacketNetwork | None = None,
    ) -> None:
        """Keep what all processes share.

        Args:
            network: connects the processes.
            settings: of all processes.
            seed: of random identities and clocks.
            clocks: each rank's clock; None: random clocks.
            datagrams: by which the nodes synchronise their clocks; None: their error stays as `clocks` says.
            traffic: what a process at a host knows of the traffic of other jobs there; None: nothing.
            packets: carries the nodes' datagrams, if the settings ask for them; None: nothing does.
        """
        self._packets: Final = packets
        self._traffic: Final = traffic
        self._network: Final = network
        self._settings: Final = settings
        self._seed: Final = seed
        self._clocks: Final = clocks or self._random_clock
        self._datagrams: Final = datagrams
        self._started = 0

    def several_jobs(self, forming_s: float = 0.5) -> SimulatedProcess[SeveralJobs]:
        """Start a scheduler of several jobs. Forming a policy takes `forming_s` of virtual time."""
        van = MemoryVan(self._network, host_of(SCHEDULER))
        van.bind(van.host, self._settings.scheduler_port)
        clock = self._clocks(SCHEDULER)
        counters = Counters()
        machine = SeveralJobs(
            self._settings,
            release=__version__,
            now=clock.local(self._network.timeline.now),
            network_nodes=network_file_nodes(self._settings),
            counters=counters,
            secret=_SECRET,
        )
        process = self._run(van, machine, clock, counters, ordered=lambda _: True)
        timeline = self._network.timeline

        def form_first_later(request: FirstPolicyRequest) -> None:
            answer = form_first_policy(request)
            timeline.after(
                forming_s, lambda: process.call(lambda now: machine.first_policy_formed(answer, now))
            )

        machine.on_form = self._form_later(process, forming_s)
        machine.on_first_policy = form_first_later
        return process

    def standby(
        self,
        host: str,
        assumed: InitialAssumptions,
        forming_s: float = 0.5,
        *,
        peers: Sequence[tuple[str, int]] = (),
    ) -> SimulatedProcess[StandbyMachine]:
        """Start a standby scheduler on a host, at the port of the scheduler; with `peers`, one that asks the
        nodes at these addresses to come.
        """
        van = MemoryVan(self._network, host)
        van.bind(van.host, self._settings.scheduler_port)
        clock = self._clocks(SCHEDULER)
        counters = Counters()
        options = SchedulerOptions.from_settings(self._settings, release=__version__, secret=_SECRET)
        now = clock.local(self._network.timeline.now)
        own = (host, self._settings.scheduler_port)
        machine = StandbyMachine(
            options,
            now=now,
            counters=counters,
            assumed=assumed if self._settings.awareness else None,
            planned=assumed,
            inquiry=PeerInquiry(peers, own, options, now) if peers else None,
        )
        process = self._run(van, machine, clock, counters, ordered=lambda _: True)
        machine.on_form = self._form_later(process, forming_s)
        return process

    def scheduler(
        self,
        policy: Policy,
        assumed: InitialAssumptions,
        forming_s: float = 0.5,
        *,
        log: bytearray | None = None,
    ) -> SimulatedProcess[SchedulerMachine]:
        """Start a scheduler whose job begins under `policy`.

        Args:
            policy: the first one.
            assumed: the network estimate that it was formed for.
            forming_s: virtual seconds that it takes to form another policy.
            log: the scheduler's log. Its records are replayed, and new ones appended. None: no log.
        """
        replayed = None
        if log is not None:
            records, size = read(bytes(log), "the log")
            replayed = ReplayedJob.replay(records, "the log")
            del log[size:]
        van = MemoryVan(self._network, host_of(SCHEDULER))
        van.bind(van.host, self._settings.scheduler_port)
        clock = self._clocks(SCHEDULER)
        counters = Counters()
        machine = SchedulerMachine(
            SchedulerOptions.from_settings(self._settings, release=__version__, secret=_SECRET),
            policy,
            now=clock.local(self._network.timeline.now),
            counters=counters,
            assumed=assumed if self._settings.awareness else None,
            planned=assumed,
            write=None if log is None else lambda records: log.extend(encode(records)),
            replayed=replayed,
        )
        process = self._run(van, machine, clock, counters, ordered=lambda _: True)
        if self._datagrams is not None:
            self._datagrams.serve_cluster_time(van.host, clock)

        machine.on_form = self._form_later(process, forming_s)
        return process

    def node(self, rank: int, host: str) -> SimulatedProcess[GeneralNode]:
        """Start a general node that asks for `rank`."""
        settings = self._settings
        van = MemoryVan(self._network, host)
        port = van.bind(host, 0)
        clock = self._clocks(rank)
        counters = Counters()
        machine = GeneralNode(
            NodeOptions(
                scheduler_host=host_of(SCHEDULER),
                scheduler_port=settings.scheduler_port,
                standbys=settings.standby_addresses,
                host=host,
                port=port,
                job=settings.job,
                site=settings.site,
                asked_rank=rank,
                num_workers=settings.num_workers,
                release=__version__,
                pid=rank,
                must_agree=explicit_job_settings(settings),
                join_timeout_s=settings.join_timeout_s,
                wait_timeout_s=settings.wait_timeout_s,
                link_timeout_s=settings.link_timeout_s,
                link_retry_s=settings.link_retry_s,
                meter=meter_options(settings),
                auxiliary=AuxiliaryOptions.from_settings(settings),
            ),
            now=clock.local(self._network.timeline.now),
            counters=counters,
        )
        synced = self._synced_clock(rank, host, clock, machine)
        process = self._run(
            van,
            machine,
            clock,
            counters,
            ordered=lambda peer: peer == SCHEDULER,
            cluster=None if synced is None else synced.cluster,
        )
        process.synced_clock = synced
        lanes = lane_options(settings)
        if lanes is not None and self._packets is not None:
            process.stack.endpoint.lanes = Lanes(
                lanes,
                self._packets.open(host, lanes.channels, van.wake),
                counters=counters,
                tokens=random.Random(f"lanes {self._seed} {self._started}"),
            )
        process.stack.endpoint.observer = machine.meter
        if machine.meter is not None:
            machine.meter.progress = lambda: progress_by_peer(van, process.stack.endpoint.connections())

        timeline = self._network.timeline

        def driver_status(_: float) -> DriverStatus:
            links = process.stack.endpoint.links()
            status = DriverStatus(
                bytes_sent=sum(link["bytes_sent"] for (peer, _), link in links.items() if peer >= 0),
                clock_offset=timeline.now + clock.sync_error_s - clock.local(timeline.now),
                clock_drift=1.0 / (1.0 + clock.drift) - 1.0,
                clock_error=abs(clock.sync_error_s),
                queued=process.stack.endpoint.queued_bytes(),
            )
            return status if synced is None else synced.with_clock(status)

        machine.status.sample_driver = driver_status
        return process

    def _form_later(
        self, process: SimulatedProcess[S], forming_s: float
    ) -> Callable[[FormationRequest], None]:
        """Return what forms a scheduler's policies; that takes `forming_s` of virtual time."""

        def submit(question: FormationRequest) -> None:
            answer = msgspec.structs.replace(form(question), took_s=forming_s)
            self._network.timeline.after(
                forming_s, lambda: process.call(lambda now: process.machine.policy_formed(answer, now))
            )

        return submit

    def _run(
        self,
        van: MemoryVan,
        machine: M,
        clock: LocalClock,
        counters: Counters,
        *,
        ordered: Callable[[Peer], bool],
        cluster: Callable[[], float] | None = None,
    ) -> SimulatedProcess[M]:
        self._started += 1
        chance = random.Random(f"process {self._seed} {self._started}")
        timeline = self._network.timeline
        endpoint = Endpoint(
            machine,
            job=self._settings.job,
            incarnation=chance.getrandbits(63),
            ordered=ordered,
            stamp=lambda: int((clock.cluster(timeline.now) if cluster is None else cluster()) * 1e9),
            limits=Limits(
                link_timeout_s=self._settings.link_timeout_s,
                busy_timeout_s=self._settings.wait_timeout_s,
                window_bytes=self._settings.window_bytes,
                shallow_windows=bool(self._settings.loss_bound or self._settings.dgt),
            ),
            rng=chance,
            acknowledges=van.acknowledges,
            progress=van.progress,
            counters=counters,
            traffic=None if self._traffic is None else self._traffic(van.host),
        )
        return SimulatedProcess(timeline, van, clock, Stack(machine, endpoint))

    def _synced_clock(
        self, rank: int, host: str, clock: LocalClock, machine: GeneralNode
    ) -> SyncedClock | None:
        if self._datagrams is None:
            return None
        along_trees = self._settings.clock_source == "trees"
        return SyncedClock(
            self._datagrams,
            host,
            clock,
            scheduler=(host_of(SCHEDULER), self._settings.scheduler_port),
            parent=lambda: (
                time_server_address(machine.policy, machine.rank, machine.members) if along_trees else None
            ),
            seed=self._seed << 16 | rank,
        )

    def _random_clock(self, rank: int) -> LocalClock:
        chance = random.Random(f"clock {self._seed} {rank}")
        return LocalClock(
            offset_s=chance.uniform(0.0, 1e6),
            drift=chance.uniform(-5e-5, 5e-5),
            sync_error_s=chance.gauss(0.0, 0.002),
        )

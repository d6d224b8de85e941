"""How the processes of a simulated cluster are put together: as the real ones are, on a van in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from netstorm import __version__
from netstorm.kvstore.membership.clock_parent import clock_address
from netstorm.kvstore.membership.node_status import DriverStatus
from netstorm.kvstore.node.general_node import GeneralNode
from netstorm.kvstore.options import NodeOptions, given, meter_options
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.observe.counters import Counters
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.endpoint.stack import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.van.interface import progress_by_peer
from netstorm.pslite.van.memory_network import MemoryNetwork
from netstorm.pslite.van.memory_van import MemoryVan
from netstorm.scheduler.jobs.first_policy import Preparation, described_nodes, prepare
from netstorm.scheduler.jobs.several_jobs import SeveralJobs
from netstorm.scheduler.log.records import encode, read
from netstorm.scheduler.log.replay import ReplayedJob
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.formation import FormationRequest
from netstorm.scheduler.policies.policy_former import form
from netstorm.settings import Settings
from netstorm.simulation.process import LocalClock, SimulatedProcess
from netstorm.simulation.timekeeping import Timekeeper, Timekeepers
from netstorm.topology.policy import Policy

__all__ = ["Starter", "host_of"]

M = TypeVar("M", bound=Machine)


def host_of(rank: int) -> str:
    """Return the name of a rank's host, or of the scheduler's."""
    return "scheduler" if rank == SCHEDULER else f"node{rank}"


class Starter:
    """Starts processes on one network."""

    def __init__(
        self,
        network: MemoryNetwork,
        settings: Settings,
        *,
        seed: int,
        clocks: Callable[[int], LocalClock] | None = None,
        keep_time: Timekeepers | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            network: between them.
            settings: of all.
            seed: of identities and clocks.
            clocks: by rank; None: random ones.
            keep_time: brings the datagrams by which nodes' clocks are synchronised; None: they are as the
                clocks say, for good.
        """
        self._network: Final = network
        self._settings: Final = settings
        self._seed: Final = seed
        self._clocks: Final = clocks or self._random_clock
        self._keep_time: Final = keep_time
        self._started = 0

    def several_jobs(self, forming_s: float = 0.5) -> SimulatedProcess[SeveralJobs]:
        """Start a scheduler of several jobs. A policy is formed in no time, and said to take `forming_s`."""
        van = MemoryVan(self._network, host_of(SCHEDULER))
        van.bind(van.host, self._settings.scheduler_port)
        clock = self._clocks(SCHEDULER)
        counters = Counters()
        machine = SeveralJobs(
            self._settings,
            release=__version__,
            now=clock.local(self._network.timeline.now),
            described=described_nodes(self._settings),
            counters=counters,
        )
        process = self._run(van, machine, clock, counters, ordered=lambda _: True)
        timeline = self._network.timeline

        def form_later(question: FormationRequest) -> None:
            answer = msgspec.structs.replace(form(question), took_s=forming_s)
            timeline.after(forming_s, lambda: process.call(lambda now: machine.formed(answer, now)))

        def prepare_later(question: Preparation) -> None:
            answer = prepare(question)
            timeline.after(forming_s, lambda: process.call(lambda now: machine.prepared(answer, now)))

        machine.on_form = form_later
        machine.on_prepare = prepare_later
        return process

    def scheduler(
        self,
        policy: Policy,
        assumed: InitialAssumptions,
        forming_s: float = 0.5,
        *,
        log: bytearray | None = None,
    ) -> SimulatedProcess[SchedulerMachine]:
        """Start a scheduler, whose job begins under `policy`, formed for what is `assumed`.

        A policy is formed in no time, and its formation said to take `forming_s`. What is in `log` is taken
        over, and what is to be written down appended to it.
        """
        past = None
        if log is not None:
            records, size = read(bytes(log), "the log")
            past = ReplayedJob.of(records, "the log")
            del log[size:]
        van = MemoryVan(self._network, host_of(SCHEDULER))
        van.bind(van.host, self._settings.scheduler_port)
        clock = self._clocks(SCHEDULER)
        counters = Counters()
        machine = SchedulerMachine(
            SchedulerOptions.from_settings(self._settings, release=__version__),
            policy,
            now=clock.local(self._network.timeline.now),
            counters=counters,
            assumed=assumed if self._settings.awareness else None,
            planned=assumed,
            write=None if log is None else lambda records: log.extend(encode(records)),
            past=past,
        )
        process = self._run(van, machine, clock, counters, ordered=lambda _: True)
        if self._keep_time is not None:
            self._keep_time.tell_cluster_time(van.host, clock)

        def ask(question: FormationRequest) -> None:
            answer = msgspec.structs.replace(form(question), took_s=forming_s)
            self._network.timeline.after(
                forming_s, lambda: process.call(lambda now: machine.formed(answer, now))
            )

        machine.on_form = ask
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
                host=host,
                port=port,
                job=settings.job,
                site=settings.site,
                asked_rank=rank,
                num_workers=settings.num_workers,
                release=__version__,
                pid=rank,
                must_agree=given(settings),
                join_timeout_s=settings.join_timeout_s,
                wait_timeout_s=settings.wait_timeout_s,
                link_retry_s=settings.link_retry_s,
                meter=meter_options(settings),
                auxiliary=AuxiliaryOptions.from_settings(settings),
            ),
            now=clock.local(self._network.timeline.now),
            counters=counters,
        )
        keeper = self._timekeeper(rank, host, clock, machine)
        process = self._run(
            van,
            machine,
            clock,
            counters,
            ordered=lambda peer: peer == SCHEDULER,
            cluster=None if keeper is None else keeper.cluster,
        )
        process.timekeeper = keeper
        process.stack.endpoint.observer = machine.meter
        if machine.meter is not None:
            machine.meter.progress = lambda: progress_by_peer(van, process.stack.endpoint.connections())

        def look(now: float) -> DriverStatus:
            links = process.stack.endpoint.links()
            outside = DriverStatus(
                bytes_sent=sum(link["bytes_sent"] for (peer, _), link in links.items() if peer != SCHEDULER),
                clock_offset=self._network.timeline.now + clock.sync_error_s - now,
                clock_drift=1.0 / (1.0 + clock.drift) - 1.0,
                clock_error=abs(clock.sync_error_s),
            )
            return outside if keeper is None else keeper.told(outside)

        machine.standing.look = look
        return process

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
                link_timeout_s=self._settings.link_timeout_s, window_bytes=self._settings.window_bytes
            ),
            rng=chance,
            counters=counters,
        )
        return SimulatedProcess(timeline, van, clock, Stack(machine, endpoint))

    def _timekeeper(self, rank: int, host: str, clock: LocalClock, machine: GeneralNode) -> Timekeeper | None:
        if self._keep_time is None:
            return None
        along_trees = self._settings.clock_source == "trees"
        return Timekeeper(
            self._keep_time,
            host,
            clock,
            scheduler=(host_of(SCHEDULER), self._settings.scheduler_port),
            whom=lambda: (
                clock_address(machine.policy, machine.rank, machine.members) if along_trees else None
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

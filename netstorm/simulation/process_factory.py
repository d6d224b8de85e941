"""Builds the processes of a simulated cluster: like real ones, but on an in-memory van and virtual clocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from netstorm import __version__
from netstorm.kvstore.membership import DriverStatus, time_server_address
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.options import NodeOptions, explicit_job_settings, meter_options
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions
from netstorm.observe.log import Counters
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.memory_network import MemoryNetwork, MemoryVan
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.pslite.session import Limits
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
from netstorm.simulation.clock_sync import Datagrams, SyncedClock
from netstorm.simulation.local_clock import LocalClock
from netstorm.simulation.process import SimulatedProcess
from netstorm.topology.policy import Policy

__all__ = ["ProcessFactory", "host_of"]

_SECRET: Final = SchedulerSecret(bytes(range(32)))
"""Of all schedulers; nodes are without a key unless the network is said to have one."""

M = TypeVar("M", bound=Machine)
S = TypeVar("S", SchedulerMachine, StandbyMachine, SeveralJobs)


def host_of(rank: int) -> str:
    """Return the host name of a rank, or of the scheduler."""
    return "scheduler" if rank == SCHEDULER else f"node{rank}"


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
    ) -> None:
        """Keep what all processes share.

        Args:
            network: connects the processes.
            settings: of all processes.
            seed: of random identities and clocks.
            clocks: each rank's clock; None: random clocks.
            datagrams: by which the nodes synchronise their clocks; None: their error stays as `clocks` says.
        """
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
            counters=counters,
        )
        endpoint.acknowledges = van.acknowledges
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

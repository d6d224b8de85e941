"""Several jobs and their one scheduler in one process, on virtual time: what `cluster` is for one job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from netstorm.errors import WaitTimeout
from netstorm.pslite.clock.virtual_time import Timeline
from netstorm.pslite.van.link_model import FixedDelay, LinkModel
from netstorm.pslite.van.memory_network import MemoryNetwork
from netstorm.scheduler.jobs.several_jobs import SeveralJobs
from netstorm.settings import Settings
from netstorm.simulation.node import Pending, SimulatedNode
from netstorm.simulation.process import SimulatedProcess
from netstorm.simulation.starting import Starter
from netstorm.simulation.virtual_network import VirtualNetwork
from netstorm.topology.networks.network import Network, Rank

__all__ = ["SimulatedJobs"]


class SimulatedJobs:
    """A scheduler of several jobs, and the jobs that come to it.

    Attributes:
        timeline: virtual time; `now` counts from the scheduler's start.
        network: the connections.
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
        detect_s: float = 3.0,
        forming_s: float = 0.5,
        **settings: object,
    ) -> None:
        """Start the scheduler.

        Args:
            seed: of everything random.
            network: links with capacities. None: every message takes `delay_s` and up to `jitter_s` more.
            hosts: which node of `network` a host is at (`host_of`); several may be at one.
            delay_s: see `network`.
            jitter_s: see `network`.
            detect_s: how long until a silent path counts as broken.
            forming_s: how long it is said to take to form a policy.
            settings: the scheduler's, by attribute of `Settings`.
        """
        self._seed: Final = seed
        self._given: Final = settings
        own = Settings.from_environment({}, **{"jobs": 0, "topology": "fapt", **settings})
        self.timeline: Final = Timeline()
        model: LinkModel
        if network is None:
            model = FixedDelay(self.timeline, delay_s=delay_s, jitter_s=jitter_s, seed=seed)
        else:
            model = VirtualNetwork(self.timeline, network, hosts or {})
        self.network: Final = MemoryNetwork(self.timeline, model, seed=seed, detect_s=detect_s)
        self._started = 0
        starter = Starter(self.network, own, seed=seed)
        self.scheduler: Final[SimulatedProcess[SeveralJobs]] = starter.several_jobs(forming_s)

    @staticmethod
    def host_of(job: str, rank: int) -> str:
        """Return the name of the host of a job's rank."""
        return f"{job}-node{rank}"

    @property
    def now(self) -> float:
        """Virtual s since the scheduler's start."""
        return self.timeline.now

    def start(self, job: str, nodes: int, **settings: object) -> list[SimulatedNode]:
        """Start the nodes of a job, also again under a name that was used before; return them by rank.

        `settings` are theirs, besides those that the scheduler and they have in common.
        """
        self._started += 1
        common = {name: value for name, value in self._given.items() if name.startswith("heartbeat")}
        own = Settings.from_environment({}, **{**common, "job": job, "num_workers": nodes, **settings})
        starter = Starter(self.network, own, seed=_seed_of(self._seed, self._started))
        return [
            SimulatedNode(rank, self.timeline, starter.node(rank, self.host_of(job, rank)))
            for rank in range(nodes)
        ]

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time (now, if that is past)."""
        self.timeline.at(time, action)

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)

    def run_until(self, wanted: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let virtual time pass until `wanted` holds.

        Raises:
            WaitTimeout: it does not after `limit_s`; says how the jobs are doing.
        """
        if not self.timeline.run_until(wanted, self.timeline.now + limit_s):
            raise WaitTimeout(
                f"seed {self._seed}: {limit_s:g} virtual s were not enough:\n"
                + self.scheduler.machine.status_text()
            )

    def run_until_ended(self, pending: Iterable[Pending], limit_s: float = 60.0) -> None:
        """Let virtual time pass until all of `pending` have ended, well or not.

        Raises:
            WaitTimeout: they have not after `limit_s`.
        """
        left = list(pending)
        self.run_until(lambda: all(one.ended for one in left), limit_s)


def _seed_of(seed: int, number: int) -> int:
    """Return a seed for the `number`-th of several."""
    return seed * 1_000_003 + number

"""Several jobs and their scheduler in one process, on virtual time; `cluster` does the same for one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from netstorm.scheduler.several_jobs import SeveralJobs
from netstorm.settings import Settings
from netstorm.simulation.node import SimulatedNode
from netstorm.simulation.process import SimulatedProcess
from netstorm.simulation.process_factory import ProcessFactory
from netstorm.simulation.simulation import Simulation
from netstorm.topology.network import Network, Rank

__all__ = ["SimulatedJobs"]


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
        detect_s: float = 3.0,
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
            detect_s: time until a silent path counts as broken.
            forming_s: virtual time that it takes to form a policy.
            settings: the scheduler's, by attribute of `Settings`.
        """
        self._seed: Final = seed
        self._given: Final = settings
        own = Settings.from_environment({}, **{"jobs": 0, "topology": "fapt", **settings})
        super().__init__(
            network, hosts or {}, seed=seed, delay_s=delay_s, jitter_s=jitter_s, detect_s=detect_s
        )
        self._started = 0
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

    def _settings_of(self, job: str, nodes: int, settings: Mapping[str, object]) -> Settings:
        common = {name: value for name, value in self._given.items() if name.startswith("heartbeat")}
        return Settings.from_environment({}, **{**common, "job": job, "num_workers": nodes, **settings})

    def _start(self, own: Settings, ranks: Iterable[int]) -> list[SimulatedNode]:
        self._started += 1
        factory = ProcessFactory(self.network, own, seed=_seed_of(self._seed, self._started))
        return [
            SimulatedNode(rank, self.timeline, factory.node(rank, self.host_of(own.job, rank)))
            for rank in ranks
        ]

    def describe(self) -> str:
        """Return how the jobs are doing."""
        texts = [machine.view.status_text() for machine in self.scheduler.machine.jobs]
        return "\n".join((f"seed {self._seed}:", *(texts or ["no job is here"])))


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the `number`-th job."""
    return seed * 1_000_003 + number

"""How long rounds take under a policy: simulated in a cluster, or predicted if that would take too long.

    experiment = Experiment(tensors=(100_000_000,), chunk_bytes=1_000_000)
    times = in_cluster(network, policy, experiment)

A round is one all-reduce of all tensors, which all ranks push at once; it ends when all ranks have all sums.
The next round begins then. The policy stays the same, even if the network changes.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from netstorm.errors import UsageError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Array, Pending
from netstorm.scheduler.status import JobStatus
from netstorm.topology.lower_bound import PART_HEADER_BYTES
from netstorm.topology.network import Network
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict

__all__ = [
    "Engine",
    "Experiment",
    "Summary",
    "by_predictor",
    "choose_engine",
    "in_cluster",
    "quartiles",
    "run",
    "summarise",
]


CLUSTER_WORK: Final = 300
"""Most chunks of a cluster's round, over all nodes: at 1 MB each they take some seconds of a processor."""

CLUSTER_BYTES: Final = 2_000_000_000
"""Most bytes of tensors over all nodes: the cluster sums real numbers, and may hold three times as much."""

_LONGEST_ROUND_S: Final = 1e6
"""Virtual s. A longer round is a hang: 244 MB over 20 kbit/s take a tenth of it."""

_ANSWER_S: Final = 0.1
"""How long the scheduler's answer takes at most."""

_STATUS_EVERY_S: Final = 0.5

_FLOAT: Final = 4

OnRound: TypeAlias = Callable[[float], None]
"""Called with the seconds of each round."""


class Engine(enum.Enum):
    """How the time of a round is found."""

    CLUSTER = "cluster"
    """By real nodes and the real scheduler on virtual time."""
    PREDICTOR = "predictor"
    """By a simulation of chunks on links: with windows and delayed acknowledgements, without sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is reduced, and in how many rounds.

    Raises:
        UsageError: no tensors, or a number that is too small.
    """

    tensors: tuple[int, ...]
    """Bytes of each tensor, in order of priority: the first is needed first."""
    chunk_bytes: int
    rounds: int = 1
    seed: int = 0
    """Seed of the cluster's clocks and identities."""

    def __post_init__(self) -> None:
        if not self.tensors or min(self.tensors) < 1:
            raise UsageError(f"tensors of {self.tensors} bytes: expected at least one, of 1 byte or more")
        if self.chunk_bytes < _FLOAT:
            raise UsageError(f"chunks of {self.chunk_bytes} bytes: expected at least {_FLOAT}, one float32")
        if self.rounds < 1:
            raise UsageError(f"{self.rounds} rounds: expected at least 1")

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors)

    @property
    def chunks(self) -> int:
        """Chunks of all tensors; a chunk holds elements of one tensor."""
        return sum(-(-size // self.chunk_bytes) for size in self.tensors)


def choose_engine(nodes: int, experiment: Experiment) -> tuple[Engine, str]:
    """Return the cluster if it takes seconds, else the predictor; and the reason as text."""
    work = nodes * experiment.chunks
    if work > CLUSTER_WORK:
        return Engine.PREDICTOR, f"{work} chunks on all nodes; the cluster is for up to {CLUSTER_WORK}"
    size = nodes * experiment.bytes
    if size > CLUSTER_BYTES:
        return Engine.PREDICTOR, f"{size} bytes on all nodes; the cluster is for up to {CLUSTER_BYTES}"
    return Engine.CLUSTER, f"{work} chunks on all nodes, of up to {CLUSTER_WORK}"


def run(
    engine: Engine,
    network: Network,
    policy: Policy,
    experiment: Experiment,
    on_round: OnRound | None = None,
    *,
    on_status: Callable[[JobStatus], None] | None = None,
) -> tuple[float, ...]:
    """Return the seconds of each round. See `in_cluster` and `by_predictor`, which has no statuses."""
    if engine is Engine.CLUSTER:
        return in_cluster(network, policy, experiment, on_round, on_status=on_status)
    return by_predictor(network, policy, experiment, on_round)


def in_cluster(
    network: Network,
    policy: Policy,
    experiment: Experiment,
    on_round: OnRound | None = None,
    *,
    on_status: Callable[[JobStatus], None] | None = None,
) -> tuple[float, ...]:
    """Return the virtual seconds of each round of real nodes, and check all sums.

    A first round, which is not counted, opens the connections and measures their rates.

    Args:
        network, policy, experiment: what is simulated.
        on_round: called with the seconds of each round.
        on_status: called with the job's status twice a virtual second.

    Raises:
        NetStormError: why a round failed; a wrong sum is an `AssertionError`.
    """
    elements = experiment.chunk_bytes // _FLOAT
    cluster = SimulatedCluster(
        network.size,
        network=network,
        policy=policy,
        seed=experiment.seed,
        chunk_size=elements,
        largest_chunk=elements,
        probe_chunk_size=1,
        max_message_bytes=max(64 * 2**20, 8 * elements),
    )
    if on_status is not None:
        cluster.watch(_STATUS_EVERY_S, on_status)
    cluster.join()
    ones = [np.ones(-(-size // _FLOAT), np.float32) for size in experiment.tensors]
    times = []
    for number in range(1 + experiment.rounds):
        seconds = _round(cluster, ones)
        if number == 0:
            cluster.run_for(_ANSWER_S)  # nodes ask for the policy of the second round at the end of the first
        else:
            times.append(seconds)
            if on_round is not None:
                on_round(seconds)
    return tuple(times)


def _round(cluster: SimulatedCluster, ones: list[Array]) -> float:
    before = cluster.now
    pending = []
    for node in cluster.nodes:
        for place, values in enumerate(ones):
            pushed = node.push(f"tensor {place}", values, priority=-place, in_place=True)
            pushed.then(partial(_check, pushed, float(cluster.size)))
            pending.append(pushed)
    cluster.run_until_ended(pending, _LONGEST_ROUND_S)
    cluster.run_for(0.0)  # run the checks of the last sums
    last = max(pushed.ended_at or 0.0 for pushed in pending)
    for node in cluster.nodes:
        node.pending.clear()
    return last - before


def _check(pending: Pending, expected: float) -> None:
    """Check a sum when it arrives, and free its memory: all sums together would not fit."""
    total = pending.result()
    pending.value = None
    if not (total == expected).all():
        raise AssertionError(f"{pending.what}: a wrong sum")


def by_predictor(
    network: Network, policy: Policy, experiment: Experiment, on_round: OnRound | None = None
) -> tuple[float, ...]:
    """Return the predicted seconds of each round."""
    times: list[float] = []
    for _ in range(experiment.rounds):
        if times and not network.changes:
            seconds = times[0]
        else:
            prediction = predict(
                network,
                policy,
                experiment.tensors,
                chunk_bytes=experiment.chunk_bytes,
                header_bytes=PART_HEADER_BYTES,
                start=sum(times),
            )
            seconds = prediction.seconds
        times.append(seconds)
        if on_round is not None:
            on_round(seconds)
    return tuple(times)


# Summary statistics over many seeds: median and quartiles of times, and the distance from the optimum.


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times of one scheme over all its seeds, in s."""

    seeds: int
    median_s: float
    q1_s: float
    q3_s: float
    of_optimum: float | None
    """Mean of optimum / time, over the seeds with a known optimum; None if there are none."""

    def as_json(self) -> dict[str, int | float | None]:
        """Return the fields of the JSON output."""
        return asdict(self)


def summarise(times: Mapping[int, float], optima: Mapping[int, float]) -> Summary:
    """Return the summary of a scheme's times, by seed; there must be one. Optima in s, by seed."""
    q1, median, q3 = quartiles(list(times.values()))
    shares = [optima[seed] / time for seed, time in times.items() if seed in optima]
    return Summary(
        seeds=len(times),
        median_s=median,
        q1_s=q1,
        q3_s=q3,
        of_optimum=statistics.fmean(shares) if shares else None,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile, interpolated between values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3

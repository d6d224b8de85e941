"""When a policy is formed, how it is judged, and whether it is taken. Pure."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from netstorm.errors import SettingsError, UsageError
from netstorm.protocol.codecs import SLOT_ELEMENT_BYTES, ChunkSizes
from netstorm.scheduler.awareness import (
    Collector,
    NetworkEstimate,
    largest_change,
    pairs_of,
    throughputs,
)
from netstorm.scheduler.link_columns import Flags, Floats, LinkColumns, NetworkColumns, PackedLinks
from netstorm.scheduler.options import chunk_sizes
from netstorm.scheduler.rounds import KeyRegistry
from netstorm.settings import AuxSearch, Settings
from netstorm.topology.files import load_network, tensors_of
from netstorm.topology.form import form_with_options
from netstorm.topology.network import RATE, Link, Network, Node, Rank, Routing
from netstorm.topology.policy import Options, Policy
from netstorm.topology.tree import MemberTree, Tree
from netstorm.units import format_bytes, format_duration

__all__ = [
    "LEAST_GAIN",
    "Adaptation",
    "Awareness",
    "FormationRequest",
    "FormationResult",
    "InitialAssumptions",
    "PolicySettings",
    "Workload",
    "check_policy",
    "first_policy",
    "initial_assumptions",
    "initial_network",
    "placeholder_policy",
    "tree_links",
    "tree_pairs",
    "workload_of",
]


# The scheduler's control loop: reports in, requests to form policies and their results, new policies out.

_log = logging.getLogger(__name__)


class Awareness:
    """The awareness of one job.

    Attributes:
        collector: estimates the network.
        adaptation: decides on policies.
        active: policies follow what is measured.
    """

    def __init__(
        self,
        assumptions: InitialAssumptions,
        first: Policy,
        now: float,
        *,
        one_machine: bool,
        fixed: bool = False,
    ) -> None:
        """Begin under the policy that was formed for what is assumed.

        On one machine without a network file, rates show how busy the processors are: they are collected for
        people, and no policy follows from them. Nor does any if the rates of a file are trusted, or if
        policies are `fixed`: then they do not follow what the job sums, either.
        """
        self._assumptions = assumptions
        self.collector: Final = Collector(
            assumptions.planned,
            known=assumptions.known,
            find_routes=assumptions.find_routes and not assumptions.described,
        )
        self.adaptation: Final = Adaptation(assumptions, self.collector, first, now)
        self._requested = False
        """Another network is assumed than the one that a policy was last formed for."""
        self._adaptable: Final = assumptions.settings.topology not in FIXED_TOPOLOGIES and not fixed
        self.active: Final = (
            assumptions.network.size > 1
            and self._adaptable
            and not (one_machine and not assumptions.described)
            and not (assumptions.known and assumptions.trusted)
        )

    def set_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each known rate; `why`: for a person."""
        if not self._assumptions.known:
            return
        self._assumptions = replace(self._assumptions, link_share=share)
        self.collector.replace_prior(self._assumptions.planned)
        if self._assumptions.network.size > 1 and self._adaptable:
            self._requested = True
            self.adaptation.request(why)

    def members_changed(self, why: str) -> None:
        """Form a policy for other members of the job; `why`: for a person."""
        if self.active:
            self._requested = True
            self.adaptation.request(why)

    def record_keys(self, keys: KeyRegistry, now: float) -> None:
        """Record what the job sums by now."""
        workload = workload_of(keys)
        if workload is not None and self._adaptable:
            self.adaptation.record_workload(workload, now)

    def due(self) -> float:
        """Return the time of the next `poll`."""
        asks = self.active or self._requested or self.adaptation.workload_changed
        return self.adaptation.due() if asks else math.inf

    def poll(self, policy: Policy, keys: KeyRegistry, now: float) -> FormationRequest | None:
        """Return a request to form a policy, if one is needed; `policy`: the one in force."""
        if now < self.due():
            return None
        request = self.adaptation.poll(policy, workload_of(keys), now)
        self._requested = self._requested and self.adaptation.urgent
        if request is not None:
            _log.info("a new policy is being formed: %s", self.adaptation.reason)
        return request

    def decide(self, result: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy that follows `policy`, now in force, if the result is worth it."""
        successor = self.adaptation.decide(result, policy)
        took = f" (formed in {result.took_s:.2f} s)" if result.took_s else ""
        if successor is None:
            _log.info("policy version %d stays: %s%s", policy.version, self.adaptation.reason, took)
        else:
            _log.info("policy version %d: %s%s", successor.version, successor.reason, took)
        return successor


# What a job's first policy rests on: the settings of policies, the workload, and the assumed network.

_SIMILAR_SIZE: Final = 0.25
"""Workloads whose bytes differ by more may need other trees: trees for 100 MB are predicted to take 12 %
longer with 4 MB (docs/measurements/awareness.md, "A policy for the job's own tensors").
"""

FIXED_TOPOLOGIES: Final = frozenset({"sharded", "balanced", "k-ary", "ring", "custom"})
"""Topologies that are the same in every network."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job sums in an iteration."""

    tensors: tuple[int, ...]
    """Bytes of each tensor, in order of priority."""
    chunk_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors)

    def is_similar(self, other: Workload) -> bool:
        """Return whether a policy for one workload suits the other."""
        large, small = max(self.bytes, other.bytes), min(self.bytes, other.bytes)
        return large <= (1 + _SIMILAR_SIZE) * small and self.chunk_bytes == other.chunk_bytes


def workload_of(keys: KeyRegistry) -> Workload | None:
    """Return what a job sums; None: it has no keys yet."""
    return Workload(keys.sizes, keys.chunk_bytes) if sum(keys.sizes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How policies are formed, and when."""

    topology: str = "fapt"
    update_time_s: float = 5.0
    update_rate: float = 0.1
    num_roots: int = 0
    hub: int = -1
    """-1: the best placed rank."""
    degree: int = 2
    custom: str = ""
    seed: int = 0
    freeze_roots: bool = False
    """Roots and their shares stay as in the first policy, as the paper's do."""
    auxiliary: bool = False
    """Policies have auxiliary paths."""
    explore: bool = False
    """Some auxiliary paths lead over links that have not been measured."""
    aux_search: AuxSearch = "spare"

    def options(
        self,
        workload: Workload,
        *,
        known: bool,
        unmeasured: Iterable[tuple[int, int]] = (),
        measured: Iterable[tuple[int, int]] = (),
    ) -> Options:
        """Return the options of a topology scheme; see `Options` for the arguments."""
        return Options(
            num_roots=self.num_roots,
            hub=None if self.hub < 0 else Rank(self.hub),
            chunk_bytes=workload.chunk_bytes,
            tensors=workload.tensors,
            degree=self.degree,
            custom=self.custom,
            known=known,
            auxiliary=self.auxiliary,
            unmeasured=tuple(unmeasured),
            measured=tuple(measured),
            aux_search=self.aux_search,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialAssumptions:
    """What the first policy is formed for."""

    network: Network
    known: bool
    """The network's rates come from a network file; otherwise they are made up."""
    described: bool = False
    """A network file says which links there are."""
    trusted: bool = False
    """Known rates are believed, whatever is measured."""
    find_routes: bool = False
    """Without a network file, look for pairs that are routes over other links."""
    settings: PolicySettings
    workload: Workload
    chunks: ChunkSizes | None = None
    """Chunk sizes that suit slow links; None: the configured ones."""
    link_share: float = 1.0
    """The job's part of each known rate; other jobs have the rest."""

    @property
    def planned(self) -> Network:
        """The network that policies are formed for."""
        if self.link_share == 1.0 or not self.known:
            return self.network
        return self.network.scaled(self.link_share)


# Which policies a job may have.


def check_policy(policy: Policy, *, nodes: int, after: int) -> None:
    """Check that a policy can follow version `after` in a job of so many nodes.

    Raises:
        UsageError: it cannot.
    """
    if policy.size != nodes:
        raise UsageError(f"a policy for {policy.size} nodes in a job of {nodes} (DMLC_NUM_WORKER)")
    if policy.version <= after:
        raise UsageError(f"policy version {policy.version} is not newer than version {after}, now in force")


def placeholder_policy(nodes: int) -> Policy:
    """Return a star that stands for a policy until one is formed."""
    parents = tuple(-1 if rank == 0 else 0 for rank in range(nodes))
    tree = Tree.undirected(Rank(0), parents)
    return Policy(version=0, trees=(tree,), weights=(1,), reason="no policy has been formed yet")


# Requests to form a policy and results: messages between the scheduler and its formation process.

_MOST_ERROR: Final = 0.5
"""Larger errors are drawn as this one, since half of a log-normal's draws would be off by even more."""


class FormationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Form a policy, and compare it with the one in force."""

    number: int
    """The result has the same number."""
    nodes: tuple[Node, ...]
    packed_links: PackedLinks
    packed_errors: bytes
    """Standard errors of the rates, as fractions, by link."""
    cap_error: float
    """Standard error of access caps, as a fraction."""
    routing: Routing
    topology: str
    options: Options
    in_force: Policy
    frozen: Policy | None = None
    """Keep the roots of this policy and their shares."""
    judged: bool = True
    """If not, the policy is taken whatever is predicted: UPDATE_RATE=0."""

    @classmethod
    def of(
        cls,
        estimate: NetworkEstimate,
        *,
        number: int,
        topology: str,
        options: Options,
        in_force: Policy,
        frozen: Policy | None = None,
        judged: bool = True,
    ) -> FormationRequest:
        """Ask for a policy for a network estimate; `frozen`: keep the roots of this policy; `judged`: take it
        only if it is better.
        """
        return cls(
            number=number,
            nodes=estimate.columns.nodes,
            packed_links=estimate.columns.links.pack(),
            packed_errors=estimate.errors.tobytes(),
            cap_error=estimate.cap_error,
            routing=estimate.columns.routing,
            topology=topology,
            options=options,
            in_force=in_force,
            frozen=frozen,
            judged=judged,
        )

    @property
    def links(self) -> tuple[Link, ...]:
        """The links."""
        return LinkColumns.unpack(self.packed_links).links()

    @property
    def errors(self) -> Floats:
        """Standard errors of the rates, as fractions, by link."""
        return np.frombuffer(self.packed_errors)

    def network(self) -> Network:
        """Return the estimated network."""
        return Network(nodes=self.nodes, links=self.links, routing=self.routing)

    def drawn_network(self, draw: random.Random) -> Network:
        """Return a random network within the errors of the estimate."""

        def drawn(value: float, error: float) -> float:
            return min(max(value * math.exp(draw.gauss(0.0, min(error, _MOST_ERROR))), RATE.least), RATE.most)

        def cap(value: float | None) -> float | None:
            return None if value is None else drawn(value, self.cap_error)

        return Network(
            nodes=tuple(
                replace(node, egress=cap(node.egress), ingress=cap(node.ingress)) for node in self.nodes
            ),
            links=tuple(
                replace(link, rate=drawn(link.rate, error))
                for link, error in zip(self.links, self.errors.tolist(), strict=True)
            ),
            routing=self.routing,
        )


class FormationResult(msgspec.Struct, frozen=True, kw_only=True):
    """A formed policy, and how it compares with the one in force."""

    number: int
    policy: Policy | None = None
    """None: there is none; `problem` says why."""
    problem: str = ""
    only_detours: bool = False
    """The trees are those of the policy in force, the auxiliary paths are not. Nothing is predicted."""
    seconds: float = 0.0
    """Predicted round time with the new policy."""
    seconds_before: float = 0.0
    """The same with the one in force; infinite: it uses a link that is gone."""
    doubt: float = 0.0
    """Standard deviation of log(before / new) over networks drawn within the errors of the estimate."""
    gain: float = 0.0
    """Mean of log(before / new) over them."""
    took_s: float = 0.0
    """Seconds that the formation took, measured by the caller."""
    packed_links: bytes = b""
    """The links that the policy's trees use, an (N, N) matrix as bits: of 512 nodes the scheduler's thread
    would take .1 s to gather them. Empty: they were not gathered.
    """

    def links(self, size: int) -> Flags:
        """Return that matrix; `size`: N."""
        bits = np.unpackbits(np.frombuffer(self.packed_links, np.uint8), count=size**2)
        return bits.reshape(size, size).astype(bool)


def tree_pairs(policy: Policy) -> frozenset[tuple[int, int]]:
    """Return the (source, target) pairs that a policy's trees use, between the members of the job."""
    return pairs_of(tree_links(policy))


def tree_links(policy: Policy) -> Flags:
    """Return the same as an (N, N) matrix: a thousand trees of 512 nodes have a million hops."""
    trees: Sequence[Tree | MemberTree] = policy.trees
    if policy.members:
        trees = [MemberTree(tree, policy.members) for tree in policy.trees]
    ranks = np.array(policy.members or range(policy.size))
    used = np.zeros((policy.size, policy.size), bool)
    for tree in trees:
        others = ranks[ranks != tree.root]
        used[others, np.array(tree.reduce_parent)[others]] = True
        used[np.array(tree.broadcast_parent)[others], others] = True
    return used


# The first policy of a job, and what is assumed before anything is measured.

_CHUNK_S: Final = 0.02
"""Longest time of a chunk on a typical link. A chunk waits as long on each hop before it goes on, and chunks
that queue behind a slowed link are rerouted one by one.
"""

_LEAST_PART: Final = 4
"""Chunks stay at least a fourth of CHUNK_SIZE: each costs processor time, and smaller ones measure no link
(PROBE_CHUNK_SIZE).
"""


def initial_network(settings: Settings) -> Network:
    """Return the network that is planned for before anything has been measured.

    Raises:
        NetworkFileError: NETSTORM_NETWORK names a file that is wrong; says where.
        SettingsError: the file has another number of nodes than the job.
    """
    if not settings.network_file:
        return Network.uniform(settings.places)
    network = load_network(settings.network_file)
    if network.size != settings.places:
        raise SettingsError(
            f"NETSTORM_NETWORK={settings.network_file!r} describes {network.size} nodes, but "
            f"{_places_text(settings)}: both must be the same"
        )
    return network


def _places_text(settings: Settings) -> str:
    if settings.elastic:
        return f"NETSTORM_ELASTIC={settings.elastic}, so the job may have {settings.places}"
    return f"DMLC_NUM_WORKER={settings.num_workers}"


def initial_assumptions(settings: Settings) -> InitialAssumptions:
    """Return all that is assumed before anything is known.

    Raises:
        UsageError: what `initial_network` raises.
    """
    tensors = tensors_of(settings.model)
    network = initial_network(settings)
    known = bool(settings.network_file) and not _is_uniform(network)
    chunks = _chunks_for(network, settings) if known else None
    elements = (chunks or chunk_sizes(settings)).of(max(tensors) // SLOT_ELEMENT_BYTES)
    return InitialAssumptions(
        network=network,
        known=known,
        described=bool(settings.network_file),
        trusted=settings.sources.get("awareness", "default") == "default",
        find_routes=settings.find_routes,
        settings=PolicySettings(
            topology=settings.topology,
            update_time_s=settings.update_time_s,
            update_rate=settings.update_rate,
            num_roots=settings.num_roots,
            hub=settings.hub,
            degree=settings.tree_degree,
            custom=settings.topology_file,
            seed=settings.seed,
            freeze_roots=settings.freeze_roots,
            auxiliary=settings.aux_path,
            explore=settings.aux_path and settings.awareness,
            aux_search=settings.aux_search,
        ),
        workload=Workload(tensors, elements * SLOT_ELEMENT_BYTES),
        chunks=chunks,
    )


def first_policy(assumptions: InitialAssumptions, *, version: int = 1) -> Policy:
    """Return the policy that a job begins under.

    Raises:
        TopologyFileError: NETSTORM_TOPOLOGY_FILE names a file that is wrong; says where.
        UsageError: what the topology cannot make of the network.
    """
    settings = assumptions.settings
    explores = settings.explore and not assumptions.known
    unmeasured = assumptions.network.linked_pairs() if explores else ()
    options = settings.options(assumptions.workload, known=assumptions.known, unmeasured=unmeasured)
    return form_with_options(assumptions.planned, settings.topology, options, version=version)


def _chunks_for(network: Network, settings: Settings) -> ChunkSizes | None:
    """Return chunk sizes that suit slow links; None: the configured ones do, or were set by the user."""
    if settings.source("chunk_size") != "default":
        return None
    sizes = chunk_sizes(settings)
    size, least = (
        sizes.smallest,
        max(sizes.smallest // _LEAST_PART, -(-settings.probe_chunk_size // SLOT_ELEMENT_BYTES)),
    )
    typical = statistics.median(link.rate for link in network.links)
    while size // 2 >= least and 8 * SLOT_ELEMENT_BYTES * size > _CHUNK_S * typical:
        size //= 2
    return replace(sizes, smallest=size)


def _is_uniform(network: Network) -> bool:
    """Return whether a network says no more than which links there are."""
    return len({(link.rate, link.latency) for link in network.links}) <= 1 and not any(
        node.egress or node.ingress for node in network.nodes
    )


# When the network is examined for changes, and when a policy may be formed for them.

SETTLE_S: Final = 0.3
_SETTLE_MOST_S: Final = 1.0
"""Links that change together are noticed one after the other, and each policy moves chunks under way. So a
poll waits until no further change was noticed for the former, but no longer than the latter
(docs/measurements/changing-networks.md, "What the scheduler knows, and when"). So it does for new keys.
"""

_POLLS: Final = 5
"""Polls per update time, so that a large change need not wait for the next update."""

_MOST_LINKS: Final = 1000
"""In larger networks there is one estimate per update time, since it takes tens of ms
(docs/measurements/awareness.md, "What the scheduler costs").
"""

_MOST_BACKOFF: Final = 8
"""Most update times between two formations if those before have come to nothing: each takes .3 s of a
processor (docs/measurements/awareness.md, "What the scheduler costs").
"""


class UpdateSchedule:
    """Times of polls and formations.

    Attributes:
        formed_at: when a formation was last asked for.
    """

    def __init__(self, update_time_s: float, links: int, now: float) -> None:
        """Begin with a wait of one update time; `links`: their number in the network."""
        self.formed_at = now
        self._update_s: Final = update_time_s
        self._poll_s: Final = update_time_s / (_POLLS if links <= _MOST_LINKS else 1)
        self._poll_at = now + update_time_s
        self._polled_at = now
        self._backoff = 1
        """Update times between two formations."""

    def due(self, changes: Sequence[float], latency_changed_at: float) -> float:
        """Return the time of the next poll.

        Args:
            changes: when links were noticed to have changed, in order.
            latency_changed_at: when a latency last changed; -inf: never.
        """
        if latency_changed_at > self._polled_at:
            return min(self._poll_at, latency_changed_at + SETTLE_S)
        if not changes or changes[-1] <= self._polled_at:
            return self._poll_at
        first = next(at for at in changes if at > self._polled_at)
        settled = min(changes[-1] + SETTLE_S, first + _SETTLE_MOST_S)
        return max(settled, self.formed_at + self._poll_s)

    def due_for_keys(self, at: float) -> float:
        """Return the time of the next poll if the workload is settled at some time."""
        return min(self._poll_at, at)

    def polled(self, now: float) -> None:
        """Note a poll."""
        self._poll_at, self._polled_at = now + self._poll_s, now

    def allows(self, now: float, *, large: bool) -> bool:
        """Return whether a policy may be formed for a change; for a large one sooner."""
        if large:
            return now >= self.formed_at + self._poll_s
        return now >= self.formed_at + self._backoff * self._update_s

    def waits(self, now: float, awaited_s: float) -> bool:
        """Return whether to wait, in so many s after the last formation, until it is known how it fares."""
        return now < self.formed_at + min(awaited_s, _MOST_BACKOFF * self._update_s)

    def allows_first(self, now: float) -> bool:
        """Return whether a first policy may be formed for measured rates."""
        return now >= self.formed_at + self._update_s

    def came_to(self, *, something: bool) -> None:
        """Note whether a formation has led to a policy."""
        self._backoff = 1 if something else min(2 * self._backoff, _MOST_BACKOFF)


# What rounds take under the policy in force, as nodes say with each heartbeat.

_WHOLE: Final = 0.5
"""A round that takes a smaller part of what is predicted sums something else than is planned for."""


class MeasuredRounds:
    """How long rounds take under the policy in force."""

    def __init__(self) -> None:
        """Begin with a policy for which nothing is predicted: its rounds are not measured."""
        self._expected: tuple[int, float] = 0, math.inf
        """A policy's version, and what a round under it is predicted to take, in s."""
        self._nodes = 0
        self._from_round = 0
        self._seconds: Final[dict[int, float]] = {}
        """Of the newest round of each node."""

    @property
    def seconds(self) -> float:
        """What a round takes, in s: the median of all nodes, so that none can tell tales; infinite: too few
        have had a whole one.
        """
        known = len(self._seconds)
        return statistics.median(self._seconds.values()) if 2 * known > self._nodes else math.inf

    @property
    def confirmed_s(self) -> float:
        """The prediction that the policy was taken for, as long as rounds keep it, or what they take, in s;
        infinite: unknown. Predictions for one network err alike, so one is compared with another.
        """
        return max(self.seconds, self._expected[1])

    @property
    def awaited_s(self) -> float:
        """In which time after the policy was formed a whole round should be known; 0: one is, or nothing is
        predicted.
        """
        return 0.0 if self.seconds < math.inf or self._expected[1] == math.inf else 2 * self._expected[1]

    def expect(self, version: int, seconds: float | None = None) -> None:
        """Note what is predicted of a policy that will be in force; None: the same as of the one before."""
        self._expected = version, self._expected[1] if seconds is None else seconds

    def begin(self, policy: Policy, from_round: int) -> None:
        """Begin with another policy, which is in force from this round on in all keys."""
        self._nodes, self._from_round = len(policy.members) or policy.size, from_round
        self._seconds.clear()
        if self._expected[0] != policy.version:
            self.expect(policy.version, math.inf)

    def record(self, rank: int, round: int, seconds: float) -> None:
        """Record how long a node's newest round took, in s."""
        if round >= self._from_round and seconds >= _WHOLE * self._expected[1]:
            self._seconds[rank] = seconds


# Whether a formed policy is installed, and whether it takes over rounds that are under way.

_SURE: Final = 1.0
"""Standard errors that the predicted gain must exceed (docs/measurements/awareness.md, "Noise changes no
policy").
"""

LEAST_GAIN: Final = 0.1
"""Least gain of a new policy: on real links one that was predicted to be 8 % faster was slower, and links
that really change cost more (docs/measurements/benchmarks.md, "Half rates, adapting with a file").
"""

_LEAST_CLEAR_GAIN: Final = 0.05
_CLEAR: Final = 3.0
"""So little will do if the gain is so many standard errors (docs/measurements/awareness.md, "Why some jobs
stay slower").
"""

_TAKEOVER_GAIN: Final = 1.5
"""Gain, as a factor, from which chunks under way are sent once more. Below it only chunks go over of which
nothing has come to their root (docs/measurements/changing-networks.md, "Takeovers: chunks that have not
begun").
"""

_TAKEOVER_S: Final = 0.3
"""Least gain of a takeover, in s: a takeover itself takes some round trips."""

_SLOWED: Final = 0.7
"""A link with less than this part of its rate has slowed: chunks under way over it are sent another way, and
all others stay (docs/measurements/changing-networks.md, "Takeovers: what is sent once more").
"""


def seems_better(result: FormationResult, error: float) -> bool:
    """Return whether a policy is predicted to be clearly better; `error`: of a typical link."""
    return result.seconds_before > (1 + max(LEAST_GAIN, error)) * result.seconds


def is_better(result: FormationResult, error: float) -> bool:
    """Return whether a policy is better by more than noise explains; `error`: of a typical link."""
    if result.seconds_before == math.inf:
        return True
    sure = result.gain > _SURE * result.doubt
    least = max(_LEAST_CLEAR_GAIN, _CLEAR * result.doubt)
    clear = result.doubt > 0.0 and result.gain > least  # 0: no networks were drawn
    better = result.seconds_before > (1 + _LEAST_CLEAR_GAIN) * result.seconds
    return sure and (seems_better(result, error) or (clear and better))


class PolicyTakeover:
    """What new policies take over from the rounds under way."""

    def __init__(self, network: NetworkColumns | None, first: Policy) -> None:
        """Begin with the first policy; None: of its network nothing is known."""
        self._planned = np.zeros(()) if network is None else throughputs(network, tree_links(first))
        """By source and target: the highest planned rate since the last full takeover; 0: none."""

    def applied(self, result: FormationResult, policy: Policy, network: NetworkColumns) -> Policy:
        """Return a policy that is to be installed, with what it takes over; `network`: what it is for."""
        used = result.links(policy.size) if result.packed_links else tree_links(policy)
        rates = throughputs(network, used | (self._planned > 0.0))
        takes_over = result.seconds + _TAKEOVER_S < result.seconds_before < math.inf
        keeps_begun = takes_over and result.seconds_before <= _TAKEOVER_GAIN * result.seconds
        slow = sorted(pairs_of(rates < _SLOWED * self._planned))
        if takes_over and not keeps_begun:
            self._planned = rates
        else:
            self._planned = np.maximum(rates, self._planned)
        return msgspec.structs.replace(
            policy, takes_over=takes_over, keeps_begun=keeps_begun, slow=tuple(slow) if takes_over else ()
        )


# Adapt the policy to the network: why a policy is formed anew, and whether the result is installed.
#
# Every `UPDATE_TIME` seconds a policy is formed if a link has changed by more than `UPDATE_RATE`, and by more
# than the error of measuring it, since the last time. A large change need not wait for that. A policy is also
# formed as soon as the job's workload is known, if it is not what was assumed. Of a network about which
# nothing was known, enough must be measured first. The result is installed if it is clearly better
# (`is_better`).

_ENOUGH: Final = 2 / 3
"""Part of the links in use that must be measured before the first policy for measured rates: the others are
planned as the slower ones of these (docs/measurements/awareness.md, "Without any knowledge: simulated
networks").
"""

_LONG_ENOUGH: Final = 3
"""Update times after which fewer will do: links may carry chunks too small to measure them."""

_LARGE: Final = 3.0
"""A change of so many times UPDATE_RATE need not wait for UPDATE_TIME."""


_SLICES_EVERY_S: Final = 0.01
"""How often a large estimate goes on, each time for about 5 ms."""


@dataclass(slots=True, kw_only=True)
class _EstimateBegun:
    """A poll that waits for its estimate."""

    reports: int
    """How many the estimate rests on."""
    continue_at: float = -math.inf


class Adaptation:
    """Decides; its owner has policies formed and installs what `decide` returns.

    Attributes:
        reason: why a policy was last formed, or what became of it; for a person.
    """

    def __init__(
        self, assumptions: InitialAssumptions, collector: Collector, first: Policy, now: float
    ) -> None:
        """Begin with the policy that was formed before anything was measured.

        Args:
            assumptions: what `first` was formed for.
            collector: where reports go.
            first: the policy in force.
            now: the time.
        """
        self.reason = ""
        self._settings: Final = assumptions.settings
        self._collector: Final = collector
        self._known: Final = assumptions.known
        self._trusted: Final = assumptions.known and assumptions.trusted
        self._workload = assumptions.workload
        self._workload_changes_at = math.inf
        """When a changed workload has settled; inf: it is the one that was planned for."""
        self._planned: NetworkEstimate | None = collector.estimate(now) if assumptions.known else None
        """The network that was last planned for; None: not enough of it was measured."""
        self._routed: frozenset[tuple[int, int]] = frozenset()
        """Its pairs that are no links."""
        self._takeover: Final = PolicyTakeover(self._planned.columns if self._planned else None, first)
        self.rounds: Final = MeasuredRounds()
        self._unsure = False
        """The last policy that was formed seemed better, and estimates were too uncertain to take it."""
        self._schedule: Final = UpdateSchedule(
            assumptions.settings.update_time_s, len(assumptions.network.links), now
        )
        self._first_report_at = math.inf
        self._reports = 0
        """Reports when a policy was last formed."""
        self._requested = ""
        """Why a policy is to be formed at once; empty: it is not."""
        self._estimating: _EstimateBegun | None = None
        self._asked: FormationRequest | None = None
        self._asked_for: NetworkEstimate | None = None
        """The network of that request."""
        self._used: tuple[Policy, Flags] | None = None
        """A policy, and the links that its trees use."""
        self._routes_are_new = False
        """For the policy in force, pairs were taken for links that are none."""
        self._number = 0
        self._frozen: Final = first if assumptions.settings.freeze_roots else None

    @property
    def urgent(self) -> bool:
        """Whether a policy is to be formed at once."""
        return bool(self._requested)

    @property
    def forming(self) -> bool:
        """Whether a result is awaited."""
        return self._asked is not None

    @property
    def workload_changed(self) -> bool:
        """Whether the policy in force is for another workload."""
        return self._workload_changes_at < math.inf

    def due(self) -> float:
        """Return the time of the next `poll`."""
        if self._asked is not None:
            return math.inf
        if self._estimating is not None:
            return self._estimating.continue_at
        if self._requested:
            return -math.inf
        if self.workload_changed:
            return self._schedule.due_for_keys(self._workload_changes_at)
        return self._schedule.due(self._collector.changes, self._collector.latency_changed_at)

    def record_workload(self, workload: Workload, now: float) -> None:
        """Record what the job sums by now."""
        if self._planned is not None and self._settings.update_rate > 0.0:  # else the next UPDATE_TIME has it
            similar = workload.is_similar(self._workload)
            self._workload_changes_at = math.inf if similar else now + SETTLE_S

    def request(self, why: str) -> None:
        """Form a policy at once: another network is assumed."""
        self._requested = why

    def poll(self, policy: Policy, workload: Workload | None, now: float) -> FormationRequest | None:
        """Return a request to form a policy, if one is needed.

        The network is estimated first: if it is large, that takes several polls, between which the scheduler
        answers its nodes.

        Args:
            policy: the one in force.
            workload: what the job sums; None: not known yet.
            now: the time.
        """
        if now < self.due():
            return None
        if self._estimating is None:
            self._schedule.polled(now)
            self._estimating = _EstimateBegun(reports=self._collector.reports)
            if self._collector.reports and self._first_report_at == math.inf:
                self._first_report_at = now
        estimate = self._collector.prior_estimate() if self._trusted else self._collector.advance(now)
        if estimate is None:
            self._estimating.continue_at = now + _SLICES_EVERY_S
            return None
        reports, self._estimating = self._estimating.reports, None
        workload = workload or self._workload
        why = self._requested or self._reason(estimate, policy, workload, now)
        if not why:
            return None
        self._requested, self.reason = "", why
        self._schedule.formed_at = now
        self._reports = reports
        if self._planned is not None or self._measured_enough(estimate, policy, now):
            self._planned = estimate
        self._routes_are_new = bool(estimate.routed) and not self._routed
        self._routed = estimate.routed
        self._workload, self._workload_changes_at = workload, math.inf
        self._number += 1
        self._asked_for = estimate
        self._asked = self._request(estimate, policy)
        return self._asked

    def decide(self, result: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy that follows `policy`, now in force, if the result is worth it."""
        asked, estimate = self._asked, self._asked_for
        if asked is None or estimate is None or result.number != asked.number:
            return None  # of a formation that was given up
        self._asked = None
        formed = result.policy
        if formed is None:
            self.reason += f"; no new policy: {result.problem}"
            self._schedule.came_to(something=not asked.judged)
            return None
        if not asked.judged:
            self._schedule.came_to(something=True)
            return self._next(formed, policy)
        if result.only_detours:
            self.reason += "; the same trees, other auxiliary paths"
            self.rounds.expect(policy.version + 1)
            return self._next(formed, policy)
        result, times = self._compared(result)
        error = float(np.median(asked.errors))
        better = (
            result.seconds
            < result.seconds_before  # rates and errors were measured beside pairs that are no links
            if self._routes_are_new
            else is_better(result, error)
        )
        self._unsure = not better and seems_better(result, error)
        self._schedule.came_to(something=better)
        if not better:
            self.reason += f"; no new policy: {times}, within what is uncertain of the estimates"
            return None
        self.reason += f"; {times}"
        self.rounds.expect(policy.version + 1, result.seconds)
        return self._next(self._takeover.applied(result, formed, estimate.columns), policy)

    # ------------------------------------------------------------------------------------------------ inside

    def _compared(self, result: FormationResult) -> tuple[FormationResult, str]:
        """Return a result with what counts as the round time of the policy in force, and both, for a person.

        Where links share lines, they look slower under that policy than under others, and so it does itself.
        """
        before, how = result.seconds_before, "predicted"
        if before == math.inf:
            return result, f"{format_duration(result.seconds)} predicted"
        if self._collector.some_shared and self.rounds.confirmed_s < before:
            before, how = self.rounds.confirmed_s, "that rounds confirm"
        text = f"{format_duration(result.seconds)} instead of {format_duration(before)} {how}"
        return msgspec.structs.replace(result, seconds_before=before), text

    def _request(self, estimate: NetworkEstimate, policy: Policy) -> FormationRequest:
        explores = self._settings.explore and not self._trusted  # what is trusted need not be measured
        # Links that no tree uses change, too: measuring them once is not enough.
        unmeasured = estimate.least_known() if explores else ()
        return FormationRequest.of(
            estimate,
            number=self._number,
            topology=self._settings.topology,
            options=self._settings.options(
                self._workload,
                known=self._known or bool(estimate.known.any()),
                unmeasured=unmeasured,
                measured=estimate.measured if explores else (),
            ),
            in_force=policy,
            frozen=self._frozen,
            judged=self._settings.update_rate > 0.0,
        )

    def _next(self, found: Policy, policy: Policy) -> Policy:
        return msgspec.structs.replace(
            found, version=policy.version + 1, reason=f"{self.reason}; {found.reason}"
        )

    def _reason(self, estimate: NetworkEstimate, policy: Policy, workload: Workload, now: float) -> str:
        """Return why a policy is to be formed, for a person; empty: it is not."""
        if estimate.routed != self._routed and self._schedule.allows(now, large=True):
            every = len(estimate.routed) + len(estimate.columns.links)
            return f"by latencies, {len(estimate.routed)} of {every} pairs of nodes are routes over others"
        rate = self._settings.update_rate
        if rate == 0.0:  # the paper's: every UPDATE_TIME, whether a change is significant or not (§VIII-B)
            due = self._collector.reports > self._reports and self._schedule.allows(now, large=False)
            return f"every {format_duration(self._settings.update_time_s)}" if due else ""
        if self._planned is None:
            may = self._schedule.allows_first(now) or self._routed
            return self._measured_enough(estimate, policy, now) if may else ""
        if now >= self._workload_changes_at and not workload.is_similar(self._workload):
            return (
                f"the job sums {format_bytes(workload.bytes)}, and the policy is for "
                f"{format_bytes(self._workload.bytes)}"
            )
        if self._collector.reports == self._reports:
            return ""
        change, what = largest_change(self._planned, estimate, rate, workload.chunk_bytes)
        if not what and self._unsure:
            what = "estimates are more certain"
        if self._collector.some_shared and self._schedule.waits(now, self.rounds.awaited_s):
            return ""
        large = change > math.log1p(_LARGE * rate)
        return what if self._schedule.allows(now, large=large) else ""

    def _measured_enough(self, estimate: NetworkEstimate, policy: Policy, now: float) -> str:
        """Return, for a person, that enough is measured to plan for it; empty: it is not."""
        if self._used is None or self._used[0] is not policy:
            self._used = policy, tree_links(policy)
        used = self._used[1].copy()
        for pair in estimate.routed:
            used[pair] = False
        measured, in_use = int((used & estimate.known).sum()), int(used.sum())
        long = now - self._first_report_at >= _LONG_ENOUGH * self._settings.update_time_s
        if not measured or (measured < _ENOUGH * in_use and not long):
            return ""
        return f"{int(estimate.known.sum())} of {len(estimate.columns.links)} links are measured"

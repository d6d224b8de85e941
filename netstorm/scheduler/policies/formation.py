"""Forming a policy and judging it: a question in, an answer out, as messages, since it is done elsewhere.

It takes from hundredths of a second to minutes, in which the scheduler must answer its nodes: so a process of
its own does it (`forming_worker`), and in the simulated cluster a timer stands for that.

A policy that is formed for what was measured is fitted to the errors of measuring, too, and always looks
better than the one in force. So both are predicted also for networks drawn at random from around the
estimate, as wide as the errors are: the new one must be better by more than what that makes of the
difference.
"""

from __future__ import annotations

import math
import random
import statistics

import msgspec

from netstorm.errors import UsageError
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.topology.networks.elements import RATE, Link, Node, Rank
from netstorm.topology.networks.network import Network, Routing
from netstorm.topology.options import Options
from netstorm.topology.policy import Policy
from netstorm.topology.schemes.form import form_policy

__all__ = ["Formation", "Formed", "form", "pairs_of"]

_DRAWS = 6
"""Enough to tell noise from a gain: with 12 decisions are the same."""

_MOST_NODES_DRAWN = 64
"""Beyond, a prediction takes seconds, and what one link's error makes of the whole is little."""


class _Link(msgspec.Struct, frozen=True, array_like=True, gc=False):
    source: int
    target: int
    rate: float
    latency: float
    loss: float
    error: float


class _Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    site: str
    egress: float | None
    ingress: float | None


class Formation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be formed."""

    number: int
    """Of the question: the answer has it, too."""
    nodes: tuple[_Node, ...]
    links: tuple[_Link, ...]
    cap_error: float
    routing: str
    topology: str
    in_force: Policy
    """What it is compared with."""
    tensors: tuple[int, ...]
    chunk_bytes: int
    num_roots: int = 0
    hub: int = -1
    custom: str = ""
    seed: int = 0
    known: bool = True
    auxiliary: bool = False
    unmeasured: tuple[tuple[int, int], ...] = ()
    """(source, target) of links that some chunks should take, if no tree uses them."""
    measured: tuple[tuple[int, int], ...] = ()
    """(source, target) of those that are known: to look at them again is not urgent."""
    frozen_roots: tuple[int, ...] = ()
    """The roots to keep, and their weights; empty: any."""
    frozen_weights: tuple[int, ...] = ()
    frozen_leads: tuple[int, ...] = ()

    @classmethod
    def of(cls, picture: NetworkEstimate, **fields: object) -> Formation:
        """Ask for a policy for what is known of a network."""
        network = picture.network
        return cls(
            nodes=tuple(_Node(node.site, node.egress, node.ingress) for node in network.nodes),
            links=tuple(
                _Link(link.source, link.target, link.rate, link.latency, link.loss, error)
                for link, error in zip(network.links, picture.errors, strict=True)
            ),
            cap_error=picture.cap_error,
            routing=network.routing.value,
            **fields,  # type: ignore[arg-type]
        )

    def network(self, chance: random.Random | None = None) -> Network:
        """Return the network, or with `chance` another that could have been measured like this."""

        def drawn(value: float, error: float) -> float:
            if chance is None:
                return value
            return min(max(value * math.exp(chance.gauss(0.0, min(error, 0.5))), RATE.least), RATE.most)

        def cap(value: float | None) -> float | None:
            return None if value is None else drawn(value, self.cap_error)

        return Network(
            nodes=tuple(
                Node(rank=Rank(rank), site=node.site, egress=cap(node.egress), ingress=cap(node.ingress))
                for rank, node in enumerate(self.nodes)
            ),
            links=tuple(
                Link(
                    source=Rank(link.source),
                    target=Rank(link.target),
                    rate=drawn(link.rate, link.error),
                    latency=link.latency,
                    loss=link.loss,
                )
                for link in self.links
            ),
            routing=Routing(self.routing),
        )

    def options(self) -> Options:
        """Return what the scheme is told."""
        return Options(
            num_roots=self.num_roots,
            hub=None if self.hub < 0 else Rank(self.hub),
            chunk_bytes=self.chunk_bytes,
            tensors=self.tensors,
            custom=self.custom,
            known=self.known,
            auxiliary=self.auxiliary,
            unmeasured=self.unmeasured,
            measured=self.measured,
            seed=self.seed,
        )


class Formed(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of it."""

    number: int
    policy: Policy | None = None
    """None: there is none, `problem` says why."""
    problem: str = ""
    only_detours: bool = False
    """Its trees are those of the policy in force, its auxiliary paths are not; nothing is predicted."""
    seconds: float = 0.0
    """Predicted with the new policy."""
    seconds_before: float = 0.0
    """With the one in force; infinite: it uses a link that is gone."""
    doubt: float = 0.0
    """Standard deviation of log(before / new) over the networks that could have been measured like this."""
    gain: float = 0.0
    """Mean of log(before / new) over them."""
    took_s: float = 0.0
    """Seconds that all of it took; whoever had it done measures."""


def form(question: Formation) -> Formed:
    """Form a policy and predict it and the one in force; deterministic."""
    from netstorm.topology.schemes.auto import expected_policy  # noqa: PLC0415 -- SciPy takes a second to load

    network, options = question.network(), question.options()
    try:
        policy = _policy(question, network)
    except UsageError as error:
        return Formed(number=question.number, problem=str(error))
    if (policy.trees, policy.weights) == (question.in_force.trees, question.in_force.weights):
        if _ways(policy) == _ways(question.in_force):
            return Formed(number=question.number, problem="it is the one in force")
        return Formed(number=question.number, policy=policy, only_detours=True)
    seconds = expected_policy(network, policy, options)
    if not _fits(question.in_force, network):
        return Formed(number=question.number, policy=policy, seconds=seconds, seconds_before=math.inf)
    before = expected_policy(network, question.in_force, options)
    gains = [math.log(before / seconds)]
    if gains[0] > 0.0 and network.size <= _MOST_NODES_DRAWN:
        chance = random.Random(f"draws {question.seed} {question.number}")
        for _ in range(_DRAWS):
            other = question.network(chance)
            times = [expected_policy(other, one, options) for one in (question.in_force, policy)]
            gains.append(math.log(times[0] / times[1]))
    return Formed(
        number=question.number,
        policy=policy,
        seconds=seconds,
        seconds_before=before,
        gain=statistics.fmean(gains),
        doubt=statistics.stdev(gains) if len(gains) > 1 else 0.0,
    )


def _policy(question: Formation, network: Network) -> Policy:
    if question.frozen_roots:
        return _frozen_policy(question, network)
    options = question.options()
    return form_policy(
        network,
        question.topology,
        num_roots=options.num_roots,
        hub=options.hub,
        chunk_bytes=options.chunk_bytes,
        tensors=options.tensors,
        custom=options.custom,
        known=options.known,
        auxiliary=options.auxiliary,
        unmeasured=options.unmeasured,
        measured=options.measured,
        seed=options.seed,
    )


def _frozen_policy(question: Formation, network: Network) -> Policy:
    from netstorm.topology.detours.spare_capacity import with_detours  # noqa: PLC0415 -- as above
    from netstorm.topology.schemes.frozen import frozen  # noqa: PLC0415 -- SciPy, as above

    options = question.options()
    roots = tuple(map(Rank, question.frozen_roots))
    forest = frozen(
        network,
        question.topology,
        roots,
        question.frozen_weights,
        options,
        leads=question.frozen_leads,
    )
    policy = forest.policy(0)
    if not options.auxiliary or network.size < 3:  # a detour has three ranks
        return policy
    return with_detours(
        network,
        policy,
        chunk_bytes=options.chunk_bytes,
        known=options.known,
        unmeasured=options.unmeasured,
        measured=options.measured,
    )


def _ways(policy: Policy) -> set[tuple[int, ...]]:
    """Return the auxiliary paths that are there to be faster."""
    return {detour.path for detour in policy.detours if not detour.explore}


def _fits(policy: Policy, network: Network) -> bool:
    """Return whether all pairs that a policy uses may talk."""
    return pairs_of(policy) <= set(network.pairs())


def pairs_of(policy: Policy) -> frozenset[tuple[int, int]]:
    """Return the (source, target) that a policy's trees use."""
    return frozenset(
        pair
        for tree in policy.trees
        for rank in range(tree.size)
        if rank != tree.root
        for pair in ((rank, tree.reduce_parent[rank]), (tree.broadcast_parent[rank], rank))
    )

"""The comparison of `netstorm plan`: how long each scheme takes on a network, and the optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np

from netstorm import clock
from netstorm.compression.auto import NAMES, Candidates
from netstorm.errors import UsageError
from netstorm.topology.form import SCHEMES, Options
from netstorm.topology.lower_bound import PART_HEADER_BYTES, LowerBound, latency_bound, lower_bound
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Floats, Optimum, Resources, fluid_time, optimum

__all__ = [
    "ALL",
    "BASELINES",
    "OBJECTIVES",
    "CodecPlan",
    "Comparison",
    "SchemeOutcome",
    "Use",
    "compare",
    "plan_codec",
    "scheme_names",
]


ALL: Final = "all"
OBJECTIVES: Final = ("time", "money", "both")
BASELINES: Final = ("star", "sharded")
"""Common today: a parameter server, and one that is spread over all nodes."""
_AUTO: Final = "auto"
_CHEAPER: Final = 0.999
"""Costs that differ by less are equal: chunks are whole."""
_CUSTOM: Final = "custom"

Progress = Callable[[str], AbstractContextManager[None]]
"""Entered during a step with this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Traffic of a policy on one resource: a directed link, or an access link with a cap."""

    name: str
    ends: tuple[int, int] | None
    """(source, target) of a link; None: an access cap."""
    capped: Rank | None
    """Whose access link it is; None: a link between two nodes."""
    nbytes: float
    busy: float
    """Fraction of the predicted time that the resource is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutcome:
    """The result of one scheme on one network."""

    policy: Policy
    formation_s: float
    """Time to form the policy on this machine."""
    fluid_s: float
    """In the fluid model."""
    predicted_s: float
    """By the simulation of all chunks."""
    uses: tuple[Use, ...]
    """By resource."""
    cost: float
    """Of a round's traffic, by the prices of links, in the currency of the network file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Schemes on one network, for one model."""

    network: Network
    tensors: tuple[int, ...]
    """Bytes."""
    chunk_bytes: int
    optimum: Optimum
    bound: LowerBound
    """For these chunks and their headers."""
    outcomes: dict[str, SchemeOutcome]
    """By scheme; in the order of `SCHEMES`."""
    errors: dict[str, str]
    """By scheme that does not apply to this network: the reason."""
    chosen: tuple[str, ...]
    """One, or the fastest and the cheapest."""

    @property
    def has_prices(self) -> bool:
        """Whether traffic costs anything."""
        return any(link.price for link in self.network.links)

    def front(self) -> list[str]:
        """Return the schemes of which no other is both faster and cheaper, the fastest first."""
        return _front(self.outcomes)

    @property
    def optimum_s(self) -> float:
        """Time of the optimum, in the fluid model."""
        return self.optimum.seconds

    @property
    def nbytes(self) -> int:
        """Size of the model."""
        return sum(self.tensors)

    def of_optimum(self, name: str) -> float:
        """Return the time of the optimum over the scheme's, both in the fluid model."""
        fluid_s = self.outcomes[name].fluid_s
        return self.optimum_s / fluid_s if fluid_s else 1.0

    def speedup(self, baseline: str, name: str) -> float | None:
        """Return the speed-up of a scheme over `baseline`; None: the baseline does not apply."""
        if baseline not in self.outcomes:
            return None
        predicted_s = self.outcomes[name].predicted_s
        return self.outcomes[baseline].predicted_s / predicted_s if predicted_s else 1.0


def scheme_names(topology: str, *, custom: bool) -> tuple[str, ...]:
    """Return the schemes to compare for `all`, `auto` or a name; `custom` says whether its file is given.

    Raises:
        UsageError: there is no such scheme, or no file for it.
    """
    if topology != ALL and topology not in SCHEMES:
        raise UsageError(f"topology {topology!r}: expected {ALL}, {', '.join(sorted(SCHEMES))}")
    if topology == _CUSTOM and not custom:
        raise UsageError("topology 'custom' needs its trees: expected --custom FILE")
    wanted = SCHEMES.keys() - ({_CUSTOM} if not custom else set())
    return tuple(name for name in SCHEMES if name in (wanted if topology == ALL else {topology, *BASELINES}))


def compare(
    network: Network,
    topology: str,
    options: Options,
    progress: Progress,
    *,
    objective: str = "time",
) -> Comparison:
    """Form and predict the policies for `topology`, and choose: of all the fastest, the cheapest, or both.

    Args:
        objective: one of `OBJECTIVES`.

    Raises:
        UsageError: an unknown scheme, or the one that was asked for does not apply to this network; or costs
            are to decide, and no link has a price.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"--objective {objective}: expected {', '.join(OBJECTIVES)}")
    if objective != "time" and not any(link.price for link in network.links):
        raise UsageError(
            f"--objective {objective}: no link of the network file has a price; expected some, such as "
            "price: 0.09/GB of a node or a link"
        )
    names = scheme_names(topology, custom=bool(options.custom))
    nbytes = options.tensor_bytes
    with progress("optimum"):
        best = optimum(network, nbytes)
        bound = lower_bound(
            network,
            best,
            options.tensors,
            chunk_bytes=options.chunk_bytes,
            header_bytes=PART_HEADER_BYTES,
        )
    resources = Resources.of(network)
    outcomes: dict[str, SchemeOutcome] = {}
    errors: dict[str, str] = {}
    for name in names:
        with progress(name):
            try:
                outcomes[name] = _outcome(name, network, resources, options)
            except UsageError as error:
                if name == topology:
                    raise
                errors[name] = str(error)
    if not outcomes:
        raise UsageError(f"no scheme applies to this network: {'; '.join(errors.values())}")
    return Comparison(
        network=network,
        tensors=options.tensors,
        chunk_bytes=options.chunk_bytes,
        optimum=best,
        bound=bound,
        outcomes=outcomes,
        errors=errors,
        chosen=(topology,) if topology != ALL else _chosen(_front(outcomes), objective),
    )


def _front(outcomes: dict[str, SchemeOutcome]) -> list[str]:
    """Return the schemes of which no other is both faster and cheaper, the fastest first."""
    found: list[str] = []
    # Of equals, auto is last.
    for name in sorted(outcomes, key=lambda name: (outcomes[name].predicted_s, name == _AUTO)):
        if not found or outcomes[name].cost < _CHEAPER * outcomes[found[-1]].cost:
            found.append(name)
    return found


def _chosen(front: list[str], objective: str) -> tuple[str, ...]:
    ends = {"time": front[:1], "money": front[-1:], "both": [front[0], front[-1]]}
    return tuple(dict.fromkeys(ends[objective]))


def _outcome(name: str, network: Network, resources: Resources, options: Options) -> SchemeOutcome:
    began = clock.monotonic()
    policy = SCHEMES[name](network, options).policy(0)
    formation_s = clock.monotonic() - began
    prediction = predict(
        network,
        policy,
        options.tensors,
        chunk_bytes=options.chunk_bytes,
        header_bytes=PART_HEADER_BYTES,
    )
    volumes = np.zeros(len(resources.pairs))
    for pair, bits in prediction.bits.items():
        volumes[resources.place(pair)] += bits
    prices: dict[tuple[int, int], float] = {(one.source, one.target): one.price for one in network.links}
    uses = tuple(_uses(network, resources, volumes, prediction.seconds))
    return SchemeOutcome(
        policy=policy,
        formation_s=formation_s,
        fluid_s=fluid_time(resources, policy, options.tensor_bytes),
        predicted_s=prediction.seconds,
        uses=uses,
        cost=sum(use.nbytes / 1e9 * prices.get(use.ends or (-1, -1), 0.0) for use in uses),
    )


def _uses(network: Network, resources: Resources, volumes: Floats, seconds: float) -> Iterator[Use]:
    ends = [(link.source, link.target) for link in network.links]
    # As `Resources` orders them: links, then egress caps, then ingress caps.
    capped = [node.rank for node in network.nodes if node.egress is not None]
    capped += [node.rank for node in network.nodes if node.ingress is not None]
    for number, bits in enumerate(resources.loads(volumes)):
        is_link = number < len(ends)
        yield Use(
            name=resources.names[number],
            ends=ends[number] if is_link else None,
            capped=None if is_link else capped[number - len(ends)],
            nbytes=float(bits) / 8,
            busy=float(bits / resources.capacities[number]) / seconds if seconds else 0.0,
        )


# Which codec `auto` would choose on a network, for a given time that a step computes.


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """The times of a round under each codec."""

    compute_s: float
    """A step computes so long."""
    times: dict[str, float]
    """Seconds of a round, by codec, the one that changes gradients least first."""
    chosen: str


def plan_codec(comparison: Comparison, compute_s: float) -> CodecPlan:
    """Return the first codec whose rounds under the first chosen scheme take no longer than a step computes,
    else the fastest.

    Args:
        comparison: of the schemes. Of the predicted time, what latency takes stays, once for each round of a
            codec, and the rest goes with the bytes. Of tensors only the bytes are known here: they count as
            square matrices.
        compute_s: seconds that a step computes between two rounds.
    """
    predicted = comparison.outcomes[comparison.chosen[0]].predicted_s
    fixed = min(predicted, latency_bound(comparison.network, 0))
    candidates = Candidates()
    shapes = [(max(1, math.isqrt(nbytes // 4)),) * 2 for nbytes in comparison.tensors]
    sizes = [max(1, nbytes) for nbytes in comparison.tensors]
    fractions = np.average([candidates.fractions(shape) for shape in shapes], axis=0, weights=sizes)
    rounds = [
        1 + max(len(candidates.of(shape)[place].parts(shape)) for shape in shapes)
        for place in range(len(NAMES))
    ]
    times = {
        name: fixed * count + (predicted - fixed) * float(fraction)
        for name, count, fraction in zip(NAMES, rounds, fractions, strict=True)
    }
    fitting = [name for name, seconds in times.items() if seconds <= compute_s]
    return CodecPlan(compute_s, times, fitting[0] if fitting else min(times, key=lambda name: times[name]))

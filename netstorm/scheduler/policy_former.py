"""Form a policy and compare it with the one in force. The formation process runs this, not the scheduler.

A formation takes from hundredths of a second to minutes, and the scheduler must answer its nodes meanwhile.

A policy that is formed for measured rates fits their errors too, so it always looks better than the one in
force. Both are therefore predicted also for networks drawn at random within the errors of the estimate, and
the scheduler installs the new policy only if the gain exceeds what the draws scatter.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import Final

import msgspec

from netstorm.errors import UsageError
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult, tree_pairs
from netstorm.scheduler.policies.member_formation import Restriction
from netstorm.topology.form import form_with_options, with_auxiliary_paths
from netstorm.topology.network import Network
from netstorm.topology.policy import Policy
from netstorm.topology.searched_schemes import expected_policy, frozen

__all__ = ["form"]

_DRAWS: Final = 6
"""Random networks per comparison. With 12, decisions are the same; what they prevent:
docs/measurements/awareness.md, "Noise changes no policy".
"""

_MOST_NODES_DRAWN: Final = 64
"""With more nodes a prediction takes seconds, and one link's error hardly changes it."""


def form(request: FormationRequest) -> FormationResult:
    """Form a policy and predict it and the one in force; deterministic."""
    members = request.in_force.members
    if len(members) in (0, len(request.nodes)):
        return _form(request)
    if len(members) == 1:
        return FormationResult(number=request.number, problem="only one node is left in the job")
    restriction = Restriction(request)
    result = _form(restriction.request)
    policy = None if result.policy is None else restriction.expanded(result.policy)
    return msgspec.structs.replace(result, policy=policy)


def _form(request: FormationRequest) -> FormationResult:
    network, options, in_force = request.network(), request.options, request.in_force
    try:
        policy = _policy(request, network)
    except UsageError as error:
        return FormationResult(number=request.number, problem=str(error))
    if (policy.trees, policy.weights) == (in_force.trees, in_force.weights):
        if _relief_paths(policy) == _relief_paths(in_force):
            return FormationResult(number=request.number, problem="it is the one in force")
        return FormationResult(number=request.number, policy=policy, only_detours=True)
    seconds = expected_policy(network, policy, options)
    if not tree_pairs(in_force) <= set(network.pairs()):
        return FormationResult(number=request.number, policy=policy, seconds=seconds, seconds_before=math.inf)
    before = expected_policy(network, in_force, options)
    gains = [math.log(before / seconds)]
    if gains[0] > 0.0 and network.size <= _MOST_NODES_DRAWN:
        draw = random.Random(f"draws {options.seed} {request.number}")
        for _ in range(_DRAWS):
            drawn = request.drawn_network(draw)
            times = [expected_policy(drawn, candidate, options) for candidate in (in_force, policy)]
            gains.append(math.log(times[0] / times[1]))
    return FormationResult(
        number=request.number,
        policy=policy,
        seconds=seconds,
        seconds_before=before,
        gain=statistics.fmean(gains),
        doubt=statistics.stdev(gains) if len(gains) > 1 else 0.0,
    )


def _policy(request: FormationRequest, network: Network) -> Policy:
    options, kept = request.options, request.frozen
    if kept is None:
        return form_with_options(network, request.topology, options)
    roots = tuple(tree.root for tree in kept.trees)
    forest = frozen(network, request.topology, roots, kept.weights, options, leads=kept.leads)
    return with_auxiliary_paths(network, forest.policy(0), options)


def _relief_paths(policy: Policy) -> set[tuple[int, ...]]:
    """Return the auxiliary paths that relieve links; exploring ones are left out."""
    return {detour.path for detour in policy.detours if not detour.explore}

"""The first policy of a job on a scheduler of several, formed for the job's share of the network. Pure.

It is formed once all nodes of the job have joined. With many nodes that takes seconds, so it must not run
on the scheduler's own thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from netstorm.errors import UsageError
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.initial_policy import first_policy, initial_assumptions
from netstorm.settings import Settings
from netstorm.topology.files import load_network
from netstorm.topology.policy import Policy

__all__ = ["FirstPolicyRequest", "FirstPolicyResult", "form_first_policy", "network_file_nodes"]


@dataclass(frozen=True, slots=True)
class FirstPolicyRequest:
    """A first policy to form."""

    number: int
    """Of the request; its result has the same."""
    settings: Settings
    """Of the job."""
    link_share: float
    """The part of each link's rate that the job plans with, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class FirstPolicyResult:
    """The result of a request."""

    number: int
    policy: Policy | None = None
    """None: none could be formed, `problem` says why."""
    planned: InitialAssumptions | None = None
    """What it was formed for."""
    problem: str = ""


def network_file_nodes(settings: Settings) -> int:
    """Return how many nodes NETSTORM_NETWORK describes; 0: there is no such file.

    Raises:
        NetworkFileError: the file is wrong; says where.
    """
    return load_network(settings.network_file).size if settings.network_file else 0


def form_first_policy(request: FirstPolicyRequest) -> FirstPolicyResult:
    """Form the policy that a job begins under; deterministic."""
    settings = request.settings
    try:
        assumption = replace(initial_assumptions(settings), link_share=request.link_share)
        policy = first_policy(assumption)
    except UsageError as error:
        return FirstPolicyResult(request.number, problem=f"job {settings.job!r} cannot begin: {error}")
    return FirstPolicyResult(request.number, policy, assumption)

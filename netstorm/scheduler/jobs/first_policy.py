"""The first policy of a job on a scheduler of several: formed once all its nodes are here, for its share of
the network. It takes up to seconds for many nodes: whoever drives the scheduler has it done beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from netstorm.errors import UsageError
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.initial_policy import first_policy, initial_assumptions
from netstorm.settings import Settings
from netstorm.topology.networks.file import load_network
from netstorm.topology.policy import Policy

__all__ = ["Preparation", "Prepared", "described_nodes", "prepare"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is to be formed."""

    number: int
    """Of the question: the answer has it, too."""
    settings: Settings
    """Of the job."""
    link_share: float
    """Of each rate, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What has come of it."""

    number: int
    policy: Policy | None = None
    """None: there is none, `problem` says why."""
    planned: InitialAssumptions | None = None
    """What it was formed for."""
    problem: str = ""


def described_nodes(settings: Settings) -> int:
    """Return how many nodes NETSTORM_NETWORK has; 0: there is no such file.

    Raises:
        NetworkFileError: it is wrong; says where.
    """
    return load_network(settings.network_file).size if settings.network_file else 0


def prepare(question: Preparation) -> Prepared:
    """Form the policy that a job begins under; deterministic."""
    settings = question.settings
    try:
        assumption = replace(initial_assumptions(settings), link_share=question.link_share)
        policy = first_policy(assumption)
    except UsageError as error:
        return Prepared(question.number, problem=f"job {settings.job!r} cannot begin: {error}")
    return Prepared(question.number, policy, assumption)

"""Whether a formed policy is installed, and whether it takes over rounds that are under way. Pure."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from netstorm.scheduler.awareness.network_change import throughputs
from netstorm.scheduler.policies.formation import FormationResult, tree_pairs
from netstorm.topology.network import Network
from netstorm.topology.policy import Policy

__all__ = ["LEAST_GAIN", "Takeover", "is_better"]

_SURE: Final = 1.0
"""Standard errors that the predicted gain must exceed (docs/measurements/awareness.md, "Noise changes no
policy").
"""

LEAST_GAIN: Final = 0.1
"""Least gain of a new policy: on real links one that was predicted to be 8 % faster was slower, and links
that really change cost more (docs/measurements/benchmarks.md, "Half rates, adapting with a file").
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


def is_better(result: FormationResult, error: float) -> bool:
    """Return whether a policy is better by more than noise explains; `error`: of a typical link."""
    if result.seconds_before == math.inf:
        return True
    least = (1 + max(LEAST_GAIN, error)) * result.seconds
    return result.seconds_before > least and result.gain > _SURE * result.doubt


class Takeover:
    """What new policies take over from the rounds under way."""

    def __init__(self, network: Network | None, first: Policy) -> None:
        """Begin with the first policy; None: of its network nothing is known."""
        self._planned = throughputs(network, tree_pairs(first)) if network else {}
        """By (source, target): the highest planned rate since the last full takeover."""

    def applied(self, result: FormationResult, policy: Policy, network: Network) -> Policy:
        """Return a policy that is to be installed, with what it takes over; `network`: what it is for."""
        rates = throughputs(network, tree_pairs(policy) | self._planned.keys())
        takes_over = result.seconds + _TAKEOVER_S < result.seconds_before < math.inf
        keeps_begun = takes_over and result.seconds_before <= _TAKEOVER_GAIN * result.seconds
        slow = sorted(pair for pair, planned in self._planned.items() if rates[pair] < _SLOWED * planned)
        if takes_over and not keeps_begun:
            self._planned = rates
        else:
            self._planned = {pair: max(rate, self._planned.get(pair, 0.0)) for pair, rate in rates.items()}
        return msgspec.structs.replace(
            policy, takes_over=takes_over, keeps_begun=keeps_begun, slow=tuple(slow) if takes_over else ()
        )

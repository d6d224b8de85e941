"""Virtual time and one network for simulated processes: what one job and several jobs have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from netstorm.errors import WaitTimeout
from netstorm.pslite.memory_network import FixedDelay, LinkModel, MemoryNetwork, Timeline
from netstorm.simulation.network.virtual_network import VirtualNetwork
from netstorm.simulation.pending import Pending
from netstorm.topology.network import Network, Rank

__all__ = ["Simulation"]


class Simulation:
    """A timeline and a network, and how virtual time passes.

    Attributes:
        timeline: virtual time, in s since the start.
        network: the connections between processes.
        link_model: how long messages take.
    """

    def __init__(
        self,
        network: Network | None,
        hosts: Mapping[str, Rank],
        *,
        seed: int,
        delay_s: float,
        jitter_s: float,
        detect_s: float,
        tcp: Literal["ideal", "reno"] = "ideal",
    ) -> None:
        """Begin at time 0, without processes.

        Args:
            network: links with capacities. None: each message takes `delay_s` and up to `jitter_s` more.
            hosts: the node of `network` at which a host is.
            seed: of jitter and losses.
            delay_s: see `network`.
            jitter_s: see `network`.
            detect_s: time until a silent path counts as broken.
            tcp: see `VirtualNetwork`.
        """
        self.timeline: Final = Timeline()
        model: LinkModel
        if network is None:
            model = FixedDelay(self.timeline, delay_s=delay_s, jitter_s=jitter_s, seed=seed)
        else:
            model = VirtualNetwork(self.timeline, network, hosts, tcp=tcp)
        self.link_model: Final = model
        self.network: Final = MemoryNetwork(self.timeline, model, seed=seed, detect_s=detect_s)

    @property
    def now(self) -> float:
        """Virtual s since the start."""
        return self.timeline.now

    def describe(self) -> str:
        """Return the state of the processes as text, for error messages."""
        raise NotImplementedError

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time, or now if that time has passed."""
        self.timeline.at(time, action)

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)

    def run_until(
        self, wanted: Callable[[], bool], limit_s: float = 60.0, what: str = "what was wanted"
    ) -> None:
        """Let virtual time pass until `wanted` returns True.

        Raises:
            WaitTimeout: it did not within `limit_s`; the message describes all processes.
        """
        if not self.timeline.run_until(wanted, self.timeline.now + limit_s):
            raise WaitTimeout(f"{limit_s:g} virtual s have not brought {what}\n{self.describe()}")

    def run_until_ended(self, pending: Iterable[Pending], limit_s: float = 60.0) -> None:
        """Let virtual time pass until all of `pending` have completed, with a result or an error.

        Raises:
            WaitTimeout: they have not within `limit_s`; the message describes all processes.
        """
        left = list(pending)

        def ended() -> bool:
            while left and left[-1].ended:
                left.pop()
            return not left

        self.run_until(ended, limit_s, "the end of all operations")

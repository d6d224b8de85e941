"""The cluster clock of a node's process: it asks a time server, and serves its children in the trees.

With NETSTORM_CLOCK=trees a node asks its parent in a tree and answers its children, as in the paper
(arXiv 2404.11352 §VI, Fig. 5); otherwise each node asks the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from netstorm import clock
from netstorm.errors import SettingsError
from netstorm.observe.counters import Counters
from netstorm.pslite.clock.sntp_socket import SntpClient, SntpServer, Watcher, packet_key
from netstorm.pslite.clock.source import Address
from netstorm.settings import Settings

__all__ = ["ClusterClock"]

_log = logging.getLogger(__name__)


class ClusterClock:
    """The cluster clock, as this process knows it.

    Attributes:
        client: asks for the time; its `now_ns` stamps what is sent.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: str,
        *,
        followed: Callable[[], Address | None],
        parent: Callable[[], Address | None],
        counters: Counters,
    ) -> None:
        """Begin with the host's clock.

        Args:
            settings: the scheduler's SNTP port, and whether nodes ask along the trees.
            scheduler: its host's address at first.
            followed: called on the I/O thread; returns the address of the scheduler that the node follows, at
                which another one may have taken the job over. None: it has not joined yet.
            parent: called on the I/O thread; returns the time server, None for the scheduler's.
            counters: of the process.

        Raises:
            SettingsError: the file of the job's key cannot be used.
        """
        self._along_trees: Final = settings.clock_source == "trees"
        self._counters: Final = counters
        self._sntp_port: Final = settings.sntp_port
        self._followed: Final = followed
        self._key: Final = packet_key(settings)
        self._server: SntpServer | None = None
        self.client: Final = SntpClient(
            scheduler,
            settings.sntp_port or settings.scheduler_port,
            scheduler=self._scheduler,
            parent=parent if self._along_trees else lambda: None,
            counters=counters,
            key=self._key,
        )

    def start(self, thread: Watcher, *, host: str, port: int) -> None:
        """Ask for the time on the I/O thread, and serve it at `host` and `port` if children may ask."""
        self.client.start(thread)
        if not self._along_trees:
            return
        try:
            self._server = SntpServer(
                host,
                port,
                now=lambda: self.client.now_ns() / 1e9,
                quality=self.client.quality,
                counters=self._counters,
                key=self._key,
            )
        except SettingsError as error:
            _log.warning("NETSTORM_CLOCK=trees: %s; other nodes will ask the scheduler", error)
        else:
            self._server.start(thread)

    def stop(self, thread: Watcher) -> None:
        """Ask and serve no more."""
        self.client.stop(thread)
        if self._server is not None:
            self._server.stop(thread)

    def _scheduler(self) -> Address | None:
        """Return the present scheduler's time server. It has the number of that scheduler's TCP port, or the
        one that NETSTORM_SNTP_PORT gives to all schedulers.
        """
        followed = self._followed()
        return None if followed is None else (followed[0], self._sntp_port or followed[1])

    def offset_to_host_s(self) -> float:
        """Return the cluster clock less the host's, in s."""
        return (self.client.now_ns() - clock.wall_ns()) / 1e9

    def offset_to_monotonic_s(self) -> float:
        """Return the cluster clock less the monotonic clock, in s."""
        return (self.client.now_ns() - clock.monotonic_ns()) / 1e9

    def error_bound_s(self, now: float) -> float:
        """Return by how much the cluster clock may be off, in s; inf while it is not known."""
        return self.client.sync.error_bound(now)

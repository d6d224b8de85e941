"""The UDP sockets of a process's lanes: a thin shell that moves packets, and decides nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import SettingsError
from netstorm.observe.log import Counters
from netstorm.pslite.datagram.lanes import Packet
from netstorm.pslite.host_addresses import udp_address, udp_socket

__all__ = ["DatagramSockets"]

_AT_ONCE: Final = 64
"""Most packets that are read from a socket before the thread's other sockets get a turn."""

_BUFFER: Final = 4 * 2**20
"""Bytes that the kernel is asked to keep while the thread does something else. Often it gives less."""

_LARGEST: Final = 2048
"""Bytes; a longer packet is cut, and fails its authentication."""

_FORCE: Final = 33
"""SO_RCVBUFFORCE, for which Python has no name: beyond the system's limit, for those who may."""


class DatagramSockets:
    """A socket for each channel.

    Attributes:
        ports: that they are bound to.
    """

    def __init__(self, host: str, port: int, channels: int, *, counters: Counters) -> None:
        """Bind `channels` sockets, to `port` and those after it; 0: to any that are free.

        Raises:
            SettingsError: that is not possible.
        """
        self._counters: Final = counters
        self._sockets: Final[list[socket.socket]] = []
        self._dscps: Final = [0] * channels
        self._arrived: list[Packet] = []
        self._addresses: Final[dict[tuple[str, int], tuple[str, int]]] = {}
        try:
            for channel in range(channels):
                self._sockets.append(_bound(host, port + channel if port else 0))
        except OSError as error:
            self.close()
            raise SettingsError(
                f"cannot receive packets at UDP {host_port(host, port)} and the {channels - 1} next ports "
                f"({error.strerror}): NETSTORM_DATAGRAM_PORT must be the first of DMLC_UDP_CHANNEL_NUM ports "
                "that are free, or 0 for any"
            ) from error
        self.ports: tuple[int, ...] = tuple(one.getsockname()[1] for one in self._sockets)

    def listen(self, watch: Callable[[int, Callable[[], None]], None]) -> None:
        """Read packets whenever a socket is readable; `watch` calls a function then."""
        for channel, one in enumerate(self._sockets):
            watch(one.fileno(), partial(self._read, channel, one))

    def take(self) -> list[Packet]:
        """Return what has come since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def transmit(self, channel: int, packet: bytes, host: str, port: int, dscp: int) -> None:
        """Send a packet, without blocking: if the kernel has no room for it, it is lost."""
        one = self._sockets[channel]
        try:
            address = self._addresses.get((host, port))
            if address is None:
                if len(self._addresses) >= 1 << 14:
                    self._addresses.clear()
                address = self._addresses[host, port] = udp_address(host, port, one.family)
            if dscp != self._dscps[channel]:
                self._dscps[channel] = dscp
                _mark(one, dscp)
            one.sendto(packet, address)
        except OSError:
            self._counters.add("lane_unsent")

    def close(self) -> None:
        """Close all sockets. A second call does nothing."""
        for one in self._sockets:
            one.close()

    def _read(self, channel: int, one: socket.socket) -> None:
        with contextlib.suppress(OSError):  # none is left; or an earlier packet could not be delivered (ICMP)
            for _ in range(_AT_ONCE):
                data, address = one.recvfrom(_LARGEST)
                self._arrived.append(Packet(channel, data, address[0], address[1]))


def _bound(host: str, port: int) -> socket.socket:
    made = udp_socket(host)
    try:
        made.setblocking(False)
        made.bind(udp_address(host, port, made.family))
        for option in (socket.SO_RCVBUF, _FORCE):
            with contextlib.suppress(OSError):
                made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    except OSError:
        made.close()
        raise
    return made


def _mark(one: socket.socket, dscp: int) -> None:
    """Mark the socket's packets from now on (RFC 2474)."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
        if one.family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)

"""ZeroMQ's options: all that the van relies on, also defaults, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SocketOption", "accepting", "both", "context_options", "keepalive_s", "marking", "opening"]


@dataclass(frozen=True, slots=True)
class SocketOption:
    """One option of a socket."""

    name: str
    """As in the `zmq` module."""
    value: int
    reason: str


def both(*, max_message_bytes: int, link_timeout_s: float) -> tuple[SocketOption, ...]:
    """Return the options of every socket that reaches another process."""
    link_timeout_ms = max(1, round(link_timeout_s * 1000))
    probe_s = keepalive_s(link_timeout_s)
    return (
        SocketOption("LINGER", 0, "closing a connection must not wait for a peer that is gone"),
        SocketOption(
            "SNDHWM",
            65_536,
            "messages; far above the window, so a full queue means that the peer has stopped reading",
        ),
        SocketOption(
            "RCVHWM",
            1_024,
            "messages; what a process is too slow to read waits in TCP and at the sender, not in its memory",
        ),
        SocketOption(
            "MAXMSGSIZE", max_message_bytes, "bytes; a peer that sends a larger frame is disconnected"
        ),
        SocketOption(
            "HEARTBEAT_IVL",
            0,
            "off: libzmq's thread does not answer in a process that is stopped, whose kernel does",
        ),
        SocketOption("TCP_KEEPALIVE", 1, "the kernel finds out that the other machine is gone"),
        SocketOption("TCP_KEEPALIVE_IDLE", probe_s, "s without traffic until it asks"),
        SocketOption("TCP_KEEPALIVE_INTVL", probe_s, "s between two questions"),
        SocketOption(
            "TCP_KEEPALIVE_CNT", 2, "questions without an answer, after which the connection is broken"
        ),
        SocketOption(
            "HANDSHAKE_IVL", link_timeout_ms, "ms; a connection that sends nothing (a port scan) is closed"
        ),
        SocketOption("SNDBUF", -1, "bytes; the kernel sizes TCP's buffers by the bandwidth-delay product"),
        SocketOption("RCVBUF", -1, "bytes; left to the kernel, as SNDBUF"),
        SocketOption("IPV6", 0, "switched on only for IPv6 addresses"),
    )


def keepalive_s(link_timeout_s: float) -> int:
    """Return the time between two probes of an idle connection: after three of them it is broken, and almost
    half of the link time-out is left for a new one. The kernel counts in whole seconds.
    """
    return max(1, round(link_timeout_s / 5))


def accepting() -> tuple[SocketOption, ...]:
    """Return the further options of the ROUTER."""
    return (
        SocketOption("ROUTER_MANDATORY", 1, "a message to a peer that is gone is an error, not silence"),
        SocketOption("ROUTER_HANDOVER", 0, "no peer can take over a connection by using its identity"),
        SocketOption("BACKLOG", 1_024, "a whole large job connects at once when it starts"),
    )


def opening(*, link_timeout_s: float) -> tuple[SocketOption, ...]:
    """Return the further options of a DEALER."""
    return (
        SocketOption(
            "RECONNECT_IVL",
            24 * 3600 * 1000,
            "ms; a connection that broke stays broken: the session opens the next one, under a new identity. "
            "With -1, what arrived before the end would be dropped unless this process has read it by then",
        ),
        SocketOption(
            "CONNECT_TIMEOUT",
            max(1, round(link_timeout_s * 500)),
            "ms; TCP's own is minutes; half the link time-out, so that there is a second attempt",
        ),
        SocketOption(
            "IMMEDIATE",
            0,
            "Hello may be handed over before the connection is up; all else waits for the Welcome",
        ),
    )


def marking(dscp: int) -> tuple[SocketOption, ...]:
    """Return the option that marks packets with a differentiated services code point; 0: none."""
    if not dscp:
        return ()
    reason = "the code point is the upper six bits of the IPv4 TOS and IPv6 traffic class byte (RFC 2474)"
    return (SocketOption("TOS", dscp << 2, reason),)


def context_options() -> tuple[SocketOption, ...]:
    """Return the options of the context."""
    return (
        SocketOption("IO_THREADS", 1, "one moves 6 GB/s; more would take cores from training"),
        SocketOption(
            "MAX_SOCKETS",
            65_535,
            "a connection opened here takes three (itself and both ends of its monitor)",
        ),
        SocketOption("BLOCKY", 0, "sockets that were not closed do not keep the process from ending"),
    )

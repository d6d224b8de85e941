"""Facts of hosts that are well, for tests that make one thing wrong."""

from __future__ import annotations

from typing import Any

from netstorm.cli.doctor.facts import Door, Facts
from netstorm.cli.doctor.pairs import ExaminedHost
from netstorm.cli.doctor.wire import ProbeResult


def facts(**changes: Any) -> Facts:
    well: dict[str, Any] = {
        "host": "tokyo",
        "identity": "0123",
        "release": "0.2.0",
        "protocol": 3,
        "python": "3.11.7",
        "kernel": "6.1.0-18-amd64",
        "own_name": ["10.0.0.1"],
        "addresses": ["10.0.0.1"],
    }
    return Facts(**well | changes)


def door(number: int, **changes: Any) -> Door:
    well: dict[str, Any] = {
        "host": "*",
        "port": 9100,
        "advertised": f"10.0.0.{number}",
        "advertised_port": 9100,
    }
    return Door(**well | changes)


def hosts(*changes: dict[str, Any]) -> list[ExaminedHost]:
    """Return hosts that are well, but for changes of their facts."""
    return [
        ExaminedHost(
            name=f"host{number}",
            facts=facts(
                **{
                    "host": f"host{number}",
                    "own_name": [f"10.0.0.{number}"],
                    "addresses": [f"10.0.0.{number}"],
                    "doors": [door(number)],
                    **changed,
                }
            ),
        )
        for number, changed in enumerate(changes)
    ]


def result(rank: int, **changes: Any) -> ProbeResult:
    well: dict[str, Any] = {
        "rank": rank,
        "place": f"10.0.0.{rank}:9100",
        "udp": True,
        "rtt": 0.03,
        "clock_offset": 0.0,
        "interface_mtu": 1500,
        "path_mtu": 1500,
        "stalls": False,
    }
    return ProbeResult(**well | changes)

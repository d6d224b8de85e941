"""What a node is and where it listens."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.settings.kinds import host, setting, whole, words

__all__ = ["NodeSettings"]


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What a node is and where it listens."""

    rank: int = setting(
        "NETSTORM_RANK", whole(-1), -1, "", "the rank to ask the scheduler for, from 0; -1: any that is free"
    )
    site: str = setting(
        "NETSTORM_SITE",
        words(r"[^\s,;/]{0,64}", "a name of at most 64 letters, without spaces, or empty"),
        "",
        "",
        "the data centre that this node is in; nodes of one site share a local network",
    )
    job: str = setting(
        "NETSTORM_JOB",
        words(r"[A-Za-z0-9._-]{1,64}", "a name of 1 to 64 letters, digits, dots, dashes or underscores"),
        "default",
        "",
        "name of the job; a scheduler of one job turns processes of another away",
    )
    bind_host: str = setting(
        "NETSTORM_BIND",
        host(or_empty=True, or_any=True),
        "",
        "",
        "address to listen on, * for every interface; empty: the advertised address only",
    )
    port: int = setting(
        "NETSTORM_PORT", whole(0, 65535), 0, "", "TCP port that this node listens on; 0: any that is free"
    )
    advertised_port: int = setting(
        "NETSTORM_ADVERTISED_PORT",
        whole(0, 65535),
        0,
        "",
        "port that this node tells the others, for where ports are mapped; 0: the one it listens on",
    )

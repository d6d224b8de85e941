"""Settings of who may take part in a job. Keys are never values of settings: these name files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netstorm.settings.kinds import one_of, setting, words

__all__ = ["SecurityMode", "SecuritySettings"]

SecurityMode: TypeAlias = Literal["auto", "off"]


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Who may take part in a job. Keys are never values of settings: these name files."""

    security: SecurityMode = setting(
        "NETSTORM_SECURITY",
        one_of("auto", "off"),
        "auto",
        "",
        "auto: connections are encrypted and authenticated if NETSTORM_KEY_FILE is set, and without it a "
        "process listens on loopback only; off: connections are plain TCP, open to whoever reaches the port, "
        "for networks that are private to the job, such as a VPN",
    )
    key_file: str = setting(
        "NETSTORM_KEY_FILE",
        words(r"[^\0]*", "the path of a file that `netstorm keys new` has made, or empty"),
        "",
        "",
        "file with the job's key, the same for its scheduler and all its nodes; whoever holds it can join "
        "the job, read its gradients and change them; empty: no key",
    )
    node_key_file: str = setting(
        "NETSTORM_NODE_KEY",
        words(r"[^\0]*", "the path of a file that `netstorm keys new --node` has made, or empty"),
        "",
        "",
        "file with this node's own key, for jobs with NETSTORM_ALLOW; empty: it has the job's key alone",
    )
    scheduler_key_file: str = setting(
        "NETSTORM_SCHEDULER_KEY",
        words(r"[^\0]*", "the path of a file that `netstorm keys new --scheduler` has made, or empty"),
        "",
        "",
        "file with the key of a job's schedulers, which no node needs: in a job with a key, nodes follow "
        "another scheduler (NETSTORM_STANDBYS, NETSTORM_RECOVERABLE) only if it has the first one's key; "
        "empty: they follow the first one alone, also if it is started again with its log",
    )
    allow_file: str = setting(
        "NETSTORM_ALLOW",
        words(r"[^\0]*", "the path of a file, or empty"),
        "",
        "",
        "file with the nodes that this process admits: a name and a public key a line; it is read again "
        "whenever it changes, and a node whose key was removed is out at once; empty: whoever holds the "
        "job's key is admitted",
    )

"""What a process needs to take part in a job that has a key, and when it may do without one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from netstorm.addresses import is_loopback
from netstorm.errors import SettingsError
from netstorm.pslite.security.curve import CurveKeys
from netstorm.pslite.security.job_key import JobKey, SchedulerKey
from netstorm.pslite.security.node_key import NodeKey
from netstorm.pslite.security.process_proof import ProcessProof
from netstorm.pslite.security.scheduler_proof import SchedulerSecret
from netstorm.settings import Settings

__all__ = [
    "Credentials",
    "job_key_of",
    "load_credentials",
    "log_if_plain",
    "scheduler_secret_of",
    "serves_others",
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys of one process, and whom it admits."""

    job: CurveKeys
    """With which a process proves, to those that connect to it, that it holds the job's key."""
    own: CurveKeys
    """With which it proves who it is where it connects: the node's own pair, or one that it has just made."""
    proof: ProcessProof
    """With which it proves there that it holds the job's key."""
    allow_file: Path | None = None
    """The nodes that are admitted; None: whoever holds the job's key."""
    name: str = ""
    """Of the node's own key; empty: it has none."""

    @classmethod
    def of_process(
        cls, key: JobKey, node: NodeKey | None = None, allow_file: Path | None = None
    ) -> Credentials:
        """Return the credentials of a process that begins.

        Args:
            key: the job's.
            node: the node's own key; None: it has the job's alone, and the process makes a pair of its own.
            allow_file: see above.
        """
        return cls(
            job=key.curve_keys(),
            own=CurveKeys.fresh() if node is None else node.keys,
            proof=ProcessProof(key),
            allow_file=allow_file,
            name="" if node is None else node.name,
        )


def job_key_of(settings: Settings) -> JobKey | None:
    """Return the job's key; None: there is none.

    Raises:
        SettingsError: its file cannot be used.
    """
    if not settings.key_file:
        return None
    return JobKey.load(Path(settings.key_file))


def log_if_plain(settings: Settings, bind_host: str, log: logging.Logger) -> None:
    """Log that this process's connections are plain, if they are: a warning if others can reach them."""
    if not settings.key_file:
        local = is_loopback(bind_host)
        log.log(
            logging.INFO if local else logging.WARNING,
            "connections are plain, neither encrypted nor authenticated (%s): %s can read and change them",
            "NETSTORM_SECURITY=off" if settings.security == "off" else "no NETSTORM_KEY_FILE",
            "users of this machine" if local else f"whoever reaches {bind_host}",
        )


def scheduler_secret_of(settings: Settings) -> SchedulerSecret:
    """Return by what nodes are to recognise this scheduler; empty: the job has no key.

    Raises:
        SettingsError: another scheduler is to take the job over, and could not prove that it may; or a file
            cannot be used.
    """
    if job_key_of(settings) is None:
        return SchedulerSecret()
    if settings.scheduler_key_file:
        return SchedulerSecret(SchedulerKey.load(Path(settings.scheduler_key_file)).secret)
    for given, text in (
        (settings.standby, "NETSTORM_STANDBY=1 (--standby)"),
        (settings.recover_peers, f"NETSTORM_RECOVER_PEERS={settings.recover_peers} (--recover)"),
        (settings.standbys, f"NETSTORM_STANDBYS={settings.standbys}"),
        (settings.recoverable, "NETSTORM_RECOVERABLE=1"),
    ):
        if given:
            raise SettingsError(
                f"{text} in a job with a key: expected NETSTORM_SCHEDULER_KEY for all schedulers, or nodes "
                "could not tell another one from anybody who has the job's key: make it with "
                "`netstorm keys new --scheduler scheduler.key`, and give it to no node"
            )
    return SchedulerSecret(SchedulerKey.fresh().secret)


def serves_others(settings: Settings) -> bool:
    """Return whether a process may listen where others can reach it: it has a key, or security is off."""
    return settings.security == "off" or bool(settings.key_file)


def load_credentials(settings: Settings, bind_host: str) -> Credentials | None:
    """Return the credentials of this process; None: it uses plain connections.

    Args:
        settings: of this process.
        bind_host: the address that it is going to listen on.

    Raises:
        SettingsError: there is no key, and the address can be reached by others; or a file cannot be used.
    """
    key = job_key_of(settings)
    if key is None:
        if settings.security != "off" and not is_loopback(bind_host):
            raise SettingsError(
                f"listening on {bind_host or '*'} needs a key, since others can reach that address: make one "
                "with `netstorm keys new job.key`, and set NETSTORM_KEY_FILE for the scheduler and all "
                "nodes; or set NETSTORM_SECURITY=off for all, if only the job can reach the network (a VPN)"
            )
        return None
    return Credentials.of_process(
        key,
        NodeKey.load(Path(settings.node_key_file)) if settings.node_key_file else None,
        Path(settings.allow_file) if settings.allow_file else None,
    )

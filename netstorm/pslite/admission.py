"""The decision about the key of a process that connects: without an allow list it is admitted.

ZeroMQ has verified that the process holds the secret part of the key (CURVE's INITIATE command). That it also
holds the job's key, its first message proves (`ProcessProof`). The list is read again and again: it is
short, and so neither its file's times nor a read that has failed once can hide that a node was removed. While
the file cannot be read, or is wrong, the last list that could be read stays in force: an editor's
half-written file must not end a job.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.errors import SettingsError
from netstorm.pslite.keys import CurveKeys, JobKey, NodeKey, SchedulerKey, check_name, key_of_text, key_text
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.settings import Settings

__all__ = [
    "NUMBER_BYTES",
    "PROOF_BYTES",
    "Admission",
    "AdmissionAnswer",
    "Credentials",
    "ProcessProof",
    "fresh_number",
    "job_key_of",
    "load_credentials",
    "log_if_plain",
    "parse_allow_list",
    "scheduler_secret_of",
    "serves_others",
]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdmissionAnswer:
    """Whether a key is admitted."""

    user: str
    """Text of the key; empty: it is not admitted."""
    reason: str = ""
    """Why it is not admitted, for a person."""


class Admission:
    """Whom one process admits. Users are known by the text of their public key."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the allow list, if there is one.

        Raises:
            SettingsError: it cannot be read, or is wrong.
        """
        self._path: Final = credentials.allow_file
        self._problem = ""
        self._text = ""
        """What `_names` was read from."""
        self._names: Mapping[str, str] = {}
        if self._path is not None:
            self._text = _read(self._path)
            self._names = _parse(self._text, self._path)

    @property
    def can_change(self) -> bool:
        """Whether there is an allow list."""
        return self._path is not None

    def decide(self, key: bytes) -> AdmissionAnswer:
        """Return whether a public key is admitted, by the list as it is now."""
        user = key_text(key)
        if self.admits(user):
            return AdmissionAnswer(user)
        return AdmissionAnswer(
            "", f"its key is not in {self._path} (NETSTORM_ALLOW), or it has none of its own"
        )

    def admits(self, user: str) -> bool:
        """Return whether a user is still admitted."""
        return self._path is None or user in self._names

    def refresh(self) -> Mapping[str, str]:
        """Read the allow list again; return the names of users that were removed."""
        path = self._path
        if path is None:
            return {}
        try:
            text = _read(path)
            if text == self._text:
                self._problem = ""
                return {}
            names = _parse(text, path)
        except SettingsError as error:
            self._complain(str(error))
            return {}
        self._problem, self._text = "", text
        before, self._names = self._names, names
        removed = {user: name for user, name in before.items() if user not in names}
        added = [name for user, name in names.items() if user not in before]
        if removed or added:
            _log.warning(
                "%s (NETSTORM_ALLOW) has changed: %d nodes are admitted; added: %s; removed: %s",
                path,
                len(names),
                ", ".join(sorted(added)) or "none",
                ", ".join(sorted(removed.values())) or "none",
            )
        return removed

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.error("%s; the list that was read before stays in force", problem)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeError) as error:
        raise _unreadable(path, error) from None
    if mode & stat.S_IWOTH:
        raise SettingsError(
            f"NETSTORM_ALLOW={path}: mode {stat.S_IMODE(mode):04o} lets everybody add keys: expected 0644"
        )
    return text


def _parse(text: str, path: Path) -> Mapping[str, str]:
    return {key_text(key): name for key, name in parse_allow_list(text, str(path)).items()}


def _unreadable(path: Path, error: Exception) -> SettingsError:
    return SettingsError(f"NETSTORM_ALLOW={path}: cannot read the allow list: {error}")


# The allow list: which nodes are admitted, by the public keys of their own.
#
# # NAME PUBLICKEY, as `netstorm keys new --node NAME` prints it
# tokyo  rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7


def parse_allow_list(text: str, path: str) -> Mapping[bytes, str]:
    """Return the names of the nodes that are admitted, by public key.

    Args:
        text: of the file.
        path: for messages.

    Raises:
        SettingsError: a line that says nothing, or two that contradict each other; begins with file and line.
    """
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):  # a key may have this character, but a name has not
            continue
        place = f"{path}, line {number}"
        if len(words) != 2:
            raise SettingsError(
                f"{place}: {len(words)} words: expected NAME PUBLICKEY, as `netstorm keys new --node` prints"
            )
        try:
            name, key = check_name(words[0]), key_of_text(words[1])
        except ValueError as error:
            raise SettingsError(f"{place}: {error}") from None
        if name in names.values() or key in names:
            raise SettingsError(
                f"{place}: {name} or its key is there twice: expected one line for each node, so that "
                "removing the line removes the node"
            )
        names[key] = name
    return MappingProxyType(names)


# Proves that who opens a connection holds the job's key, and means the key pair of its own.
#
# Every process has a key pair of its own; CURVE proves that it has it. That it may use it in this job is
# proved by a digest of the pair's public key, under a key that is derived from the job's. The digest also
# covers a random number, so that each connection has a proof of its own, which is its name. It is sent
# encrypted, before any message. Who repeats another process's proof gains nothing: it has not got that
# process's key pair.
#
# CURVE also requires that who connects knows the public key of the job's pair, which is never sent. This is
# not relied on: some builds of ZeroMQ accept points of small order, for which no key is needed (RFC 7748,
# section 6.1).

NUMBER_BYTES: Final = 8
"""Of the random number of a connection."""

_DIGEST_BYTES: Final = 16
"""Each guess takes a connection and a handshake."""

PROOF_BYTES: Final = NUMBER_BYTES + _DIGEST_BYTES
"""Size of a proof: a number, and the digest."""

_PERSON: Final = b"netstorm process"


def fresh_number() -> bytes:
    """Return a number that no other connection has."""
    return secrets.token_bytes(NUMBER_BYTES)


class ProcessProof:
    """Makes and checks the proofs of one job."""

    __slots__ = ("_key",)

    def __init__(self, key: JobKey) -> None:
        self._key: Final = key.derive("processes")

    def fresh(self, public: bytes) -> bytes:
        """Return a proof for one connection of the process that has a public key."""
        number = fresh_number()
        return number + self._digest(number, public)

    def is_valid(self, proof: bytes, public: bytes) -> bool:
        """Return whether a proof comes from a holder of the job's key, and is about a public key."""
        number = proof[:NUMBER_BYTES]
        return len(proof) == PROOF_BYTES and hmac.compare_digest(
            proof[NUMBER_BYTES:], self._digest(number, public)
        )

    def _digest(self, number: bytes, public: bytes) -> bytes:
        return hashlib.blake2b(
            number + public, key=self._key, digest_size=_DIGEST_BYTES, person=_PERSON
        ).digest()


# What a process needs to take part in a job that has a key, and when it may do without one.


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

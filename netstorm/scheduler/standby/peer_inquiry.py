"""How a scheduler that takes a job over finds its nodes, given the addresses of some of them. Pure.

It asks each for the members of the job, and tells it where it listens itself. A node that has lost its
scheduler comes. So one peer that is alive is enough, and what a peer says of others decides only whom to ask.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import host_port
from netstorm.protocol import messages as m
from netstorm.protocol.frames import UNKNOWN, Peer
from netstorm.pslite.machine import Connect, Disconnect, Instruction, Send
from netstorm.pslite.proofs import is_about_keys, proof_for_offer
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["PeerInquiry"]

_log = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 1.0
"""Between two questions to a node: it may lose its scheduler at any time, or go over to another one."""

_SHOWN: Final = 4
"""Peers that a message for people describes."""


@dataclass(slots=True)
class _Asked:
    """One address at which there may be a node."""

    host: str
    port: int
    named: bool
    """The user has named it."""
    asked: bool = False
    """A question is under way."""
    problem: str = "no answer yet"
    answer: m.RecoverAnswer | None = None
    proof: bytes = b""
    """That this is a scheduler of its job; empty: not made, or not wanted."""

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)


class PeerInquiry:
    """The questions of one scheduler.

    Attributes:
        error: why the job cannot be taken over; empty: it may be.
    """

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        listens_at: tuple[str, int],
        options: SchedulerOptions,
        now: float,
    ) -> None:
        """Begin to ask.

        Args:
            peers: addresses of nodes.
            listens_at: where nodes reach this scheduler.
            options: of the job.
            now: the time.
        """
        self.error = ""
        self._options: Final = options
        self._listens_at: Final = listens_at
        self._asked: Final[dict[Peer, _Asked]] = {}
        self._instructions: list[Instruction] = []
        self._ask_at = now
        self._ends_at = now + options.join_timeout_s
        self._has_answers = False
        self._alive_at = math.inf
        """By then the nodes have noticed it if their scheduler is gone."""
        for host, port in peers:
            self._add(host, port, named=True)

    def answered(self, peer: Peer, message: m.RecoverAnswer, now: float) -> None:
        """Handle a node's answer."""
        asked = self._asked.get(peer)
        if asked is None:
            return
        if len(message.members) != self._options.num_workers or message.elastic != self._options.elastic:
            if asked.named:
                self.error = self._other_job(asked, message)
            return
        if message.unproven:
            self._prove(asked, message, now)
            return
        if not self._has_answers:
            self._has_answers, self._alive_at = True, now + self._notice_s
        asked.asked, asked.problem, asked.answer = False, "", message
        known = {(one.host, one.port) for one in self._asked.values()}
        ranks = {one.answer.rank for one in self._asked.values() if one.answer is not None}
        for member in message.members:
            if member.port and member.rank not in ranks and (member.host, member.port) not in known:
                self._add(member.host, member.port)

    def lost(self, peer: Peer, reason: str) -> None:
        """Handle that a node does not answer, or refuses to."""
        asked = self._asked.get(peer)
        if asked is None:
            return
        if asked.problem != reason:
            _log.warning("the node at %s does not answer: %s", asked.address, reason)
        asked.asked, asked.problem, asked.answer = False, reason, None
        if (
            not self._has_answers
            and asked.named
            and (is_about_keys(reason) or _OTHER_JOB in reason or _SCHEDULER in reason)
        ):
            self.error = f"--peers {asked.address}: {reason}: expected a node of job {self._options.job!r}"

    def tick(self, now: float, waiting: str) -> None:
        """Ask, and find out whether that is in vain.

        Args:
            now: the time.
            waiting: who is missing, for a person; empty: nobody has come.
        """
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            for peer, asked in self._asked.items():
                if not asked.asked:
                    asked.asked = True
                    host, port = self._listens_at
                    self._instructions += [
                        Connect(peer=peer, host=asked.host, port=asked.port),
                        Send(peer=peer, message=m.Recover(host=host, port=port, proof=asked.proof)),
                    ]
        if now >= self._alive_at:
            self._alive_at = now + self._notice_s
            self.error = self.error or ("" if waiting else self._alive())
        if not self.error and now >= self._ends_at:
            limit = f"within {self._options.join_timeout_s:g} s (NETSTORM_JOIN_TIMEOUT)"
            self.error = f"{waiting}, {limit}" if waiting else f"{self._nobody()}, {limit}"

    def next_tick(self) -> float:
        """Return when something is due."""
        return min(self._ask_at, self._ends_at, self._alive_at)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken, self._instructions = self._instructions, []
        return taken

    def end(self) -> None:
        """Ask no more."""
        self._instructions = [Disconnect(peer=peer) for peer in self._asked]
        self._asked.clear()
        self._ask_at = self._ends_at = self._alive_at = math.inf

    def status_text(self) -> str:
        """Return what the nodes say, for a person."""
        return "; ".join(_some(self._text(one) for one in self._asked.values()))

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _notice_s(self) -> float:
        """How long a node may take to notice that its scheduler is gone: until its connection is broken,
        and until it cannot make another one.
        """
        return 2 * self._options.link_timeout_s + self._options.heartbeat_timeout_s

    def _prove(self, asked: _Asked, message: m.RecoverAnswer, now: float) -> None:
        """Ask a node once more, with the proof that it wants."""
        mine = [one for one in message.members if one.rank == message.rank]
        key = self._options.secret.key_for(self._options.job, mine[0]) if mine else b""
        proof = proof_for_offer(key, *self._listens_at)
        asked.asked, asked.answer = False, None
        if proof and proof != asked.proof:
            asked.proof, self._ask_at = proof, now
            return
        asked.problem = (
            "it follows only schedulers with the secret of the one before: expected that one's "
            "NETSTORM_SCHEDULER_KEY, which it must have had from the job's beginning"
        )
        if asked.named and not self._has_answers:
            self.error = f"--peers {asked.address}: {asked.problem}"

    def _add(self, host: str, port: int, *, named: bool = False) -> None:
        self._asked[Peer(UNKNOWN - len(self._asked))] = _Asked(host, port, named)
        self._ask_at = -math.inf

    def _text(self, asked: _Asked) -> str:
        answer = asked.answer
        if answer is None:
            return f"{asked.address}: {asked.problem}"
        says = "comes here" if answer.accepted else f"follows the scheduler at {answer.scheduler}"
        return f"rank {answer.rank} at {asked.address} {says}"

    def _alive(self) -> str:
        """Return that the nodes have a scheduler; empty: they have not."""
        answers = [one.answer for one in self._asked.values() if one.answer is not None]
        if not answers or any(answer.accepted for answer in answers):
            return ""
        where = ", ".join(_some(sorted({answer.scheduler for answer in answers})))
        return (
            f"job {self._options.job!r} has a scheduler, at {where}: {len(answers)} nodes follow it, and did "
            f"not lose it in {self._notice_s:g} s (NETSTORM_LINK_TIMEOUT and PS_HEARTBEAT_TIMEOUT): expected "
            "one that is gone; if it does not work, end its process first"
        )

    def _nobody(self) -> str:
        return (
            f"no node of job {self._options.job!r} comes: {self.status_text()}: expected addresses at which "
            "its nodes listen, as their log and `netstorm top` show them (NETSTORM_PORT)"
        )

    def _other_job(self, asked: _Asked, answer: m.RecoverAnswer) -> str:
        own, elastic = self._options, answer.elastic
        theirs = f"NETSTORM_ELASTIC={elastic[0]}:{elastic[1]}" if elastic else "no NETSTORM_ELASTIC"
        ours = f"{own.elastic[0]}:{own.elastic[1]}" if own.elastic else "none"
        return (
            f"--peers {asked.address}: its job has {len(answer.members)} ranks and {theirs}, this scheduler "
            f"{own.num_workers} and {ours}: give this scheduler the settings of the one before (-n, "
            "NETSTORM_ELASTIC)"
        )


_OTHER_JOB: Final = "this is a node of job"
"""Part of the refusal of a node of another job."""

_SCHEDULER: Final = ", not rank"
"""Part of the refusal of a scheduler."""


def _some(texts: Iterable[str]) -> list[str]:
    found = list(texts)
    return found[:_SHOWN] + [f"{len(found) - _SHOWN} more"] * (len(found) > _SHOWN)

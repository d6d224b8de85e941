"""Drives a SchedulerMachine by hand: hellos, messages and virtual time in, the messages to each node out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Inquire, Refuse, Send
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import InitialAssumptions, PolicySettings, Workload
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

RELEASE = "1.2.3"
M = TypeVar("M", bound=m.Message)


def star(ranks: int, version: int = 1, hub: int = 0) -> Policy:
    parents = tuple(-1 if rank == hub else hub for rank in range(ranks))
    return Policy(version=version, trees=(Tree.undirected(Rank(hub), parents),), weights=(1,))


class Driven:
    """A scheduler, and what it sent to each node. A node is known by a name, which is also its host."""

    def __init__(self, num_workers: int = 2, *, measures: bool = False, **options: Any) -> None:
        """`measures`: it estimates the network from what nodes report; policies stay."""
        self.options = SchedulerOptions(
            **{
                "num_workers": num_workers,
                "job": "alexnet",
                "release": RELEASE,
                "job_wide": {"CHUNK_SIZE": "65536", "NETSTORM_TOPOLOGY": "fapt"},
                **options,
            }
        )
        self.now = 100.0
        assumed = None
        if measures:
            assumed = InitialAssumptions(
                network=Network.uniform(num_workers),
                known=False,
                settings=PolicySettings(topology="ring"),
                workload=Workload((10**6,), 10**5),
            )
        self.machine = SchedulerMachine(self.options, star(num_workers), now=self.now, assumed=assumed)
        self.peers: dict[str, Peer] = {}
        self.sent: dict[Peer, list[m.Message]] = {}
        self.disconnected: list[Peer] = []
        self.inquired: list[Inquire] = []
        self.busy: set[int] = set()
        """Ranks of which an inquiry finds that they are busy."""
        self.late = False
        """It also finds that their machines answer late."""
        self.called = 0

    # ------------------------------------------------------------------------------------------ in

    def hello(
        self, name: str, *, job: str = "alexnet", incarnation: int | None = None, sender: int = -1
    ) -> Admission:
        hello = m.Hello(
            job=job,
            sender=sender,
            incarnation=incarnation
            if incarnation is not None
            else sum(name.encode()) * 1000 + len(self.peers),
            receiver=SCHEDULER,
            session=1,
            received=0,
        )
        verdict = self.machine.admit(hello)
        if isinstance(verdict, Admit):
            self.peers[name] = verdict.peer
        return verdict

    def join(self, name: str, rank: int = -1, *, site: str = "", job: str = "alexnet", **fields: Any) -> None:
        if name not in self.peers:
            assert isinstance(self.hello(name, job=job), Admit)
        message = m.Join(
            asked_rank=rank,
            num_workers=self.options.num_workers,
            host=name,
            port=4000,
            site=site,
            release=RELEASE,
            pid=1,
        )
        self.say(name, _replace(message, **fields))

    def say(self, who: str | int, message: m.Message) -> None:
        peer = self.peers[who] if isinstance(who, str) else self.peer_of(who)
        self.machine.receive(peer, message, None, 0, self.now)
        self.take()

    def lose(self, who: str | int, reason: str = "no answer for 10 s") -> None:
        peer = self.peers[who] if isinstance(who, str) else self.peer_of(who)
        self.machine.peer_lost(peer, reason, self.now)
        self.take()

    def end_connection(self, who: str | int) -> None:
        """The connection of a node ends, and no process listens at its address."""
        peer = self.peers[who] if isinstance(who, str) else self.peer_of(who)
        self.machine.connection_gone(peer, "reset", self.now, refused=False)
        self.take()
        if any(inquiry.peer == peer for inquiry in self.inquired):
            self.machine.connection_gone(peer, "n:1 refuses connections", self.now, refused=True)
        self.take()

    def run(self, seconds: float, *, beating: tuple[int, ...] = (), busy: str = "") -> None:
        """Let time pass in ticks as the machine asks for; ranks in `beating` send their heartbeats."""
        end = self.now + seconds
        beat_at = dict.fromkeys(beating, self.now)
        while True:
            due = min([self.machine.next_tick(), *beat_at.values()])
            if due > end:
                break
            self.now = max(self.now, due)
            for rank, at in beat_at.items():
                if at <= self.now:
                    beat_at[rank] = self.now + self.options.heartbeat_interval_s
                    self.say(rank, m.Heartbeat(busy=busy))
            if self.machine.next_tick() <= self.now:
                self.tick()
                assert self.machine.next_tick() > self.now, "a tick that leaves something due would spin"
        self.now = end

    def tick(self) -> None:
        self.machine.tick(self.now)
        self.take()

    def stop(self, reason: str = "stopped") -> None:
        self.machine.stop(reason, self.now)
        self.take()

    def install(self, policy: Policy) -> None:
        self.machine.install(policy, self.now)
        self.take()

    # ----------------------------------------------------------------------------------------- out

    @overload
    def heard(self, who: str | int) -> list[Any]: ...
    @overload
    def heard(self, who: str | int, kind: type[M]) -> list[M]: ...
    def heard(self, who: str | int, kind: type[m.Message] = m.Message) -> Sequence[m.Message]:
        """Return what was sent to a node since the last call, or only one kind of it; forgets all of it."""
        peer = self.peers[who] if isinstance(who, str) else self.peer_of(who)
        return [message for message in self.sent.pop(peer, []) if isinstance(message, kind)]

    def gone(self, who: str | int) -> m.PeerGone:
        """Return the one message of an end that was sent to a node."""
        (found,) = self.heard(who, m.PeerGone)
        return found

    def exit_code(self) -> int:
        """Return with which code the scheduler ends."""
        assert self.machine.outcome is not None
        return self.machine.outcome.exit_code

    def peer_of(self, rank: int) -> Peer:
        return self.peers[self.machine.members[rank].host]

    def forget(self) -> None:
        self.sent.clear()

    def take(self) -> None:
        for instruction in self.machine.take_instructions():
            match instruction:
                case Send(peer=peer, message=message):
                    self.sent.setdefault(peer, []).append(message)
                case Inquire():
                    self.inquired.append(instruction)
                    for rank in self.busy:
                        if self.peer_of(rank) == instruction.peer:
                            self.machine.peer_busy(instruction.peer, 1.0, self.now, late=self.late)
                case Disconnect(peer=peer):
                    self.disconnected.append(peer)
                case Call(function=function):
                    self.called += 1
                    function()
                case _:
                    raise AssertionError(instruction)


def running(ranks: int = 3, **options: Any) -> Driven:
    """Return a scheduler whose nodes n0, n1, … (sites site0, …) have all joined."""
    driven = Driven(ranks, **options)
    for rank in range(ranks):
        driven.join(f"n{rank}", rank, site=f"site{rank}")
    driven.forget()
    return driven


def refused(verdict: Admission) -> str:
    assert isinstance(verdict, Refuse)
    return verdict.reason


def refusal(driven: Driven, name: str) -> str:
    gone = driven.gone(name)
    assert (gone.rank, gone.kind) == (-1, "refused")
    assert driven.peers[name] in driven.disconnected
    return gone.reason


def key(
    name: str, shape: tuple[int, ...] = (10, 20), dtype: str = "float32", namespace: int = 0
) -> m.KeySpec:
    return m.KeySpec(namespace=namespace, name=name, shape=shape, dtype=dtype)


def begun(key: int, round: int, rule: str = "") -> m.RoundBegun:
    return m.RoundBegun(key=key, round=round, rule=rule)


def _replace(message: m.Join, **fields: Any) -> m.Join:
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    assert set(fields) <= set(values), fields
    return m.Join(**{**values, **fields})


__all__ = ["RELEASE", "Driven", "begun", "key", "refusal", "refused", "running", "star"]

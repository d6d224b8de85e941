"""All ranks compare digests of their states; those that differ take over that of most."""

from __future__ import annotations

import logging
from typing import Final

import torch
import torch.distributed as dist

from netstorm.checkpoint.format import digest, pack, unpack
from netstorm.errors import Disagreement, NodeLost
from netstorm.frontends.torch.checkpoint import TorchTensors
from netstorm.frontends.torch.elastic.entries import Entries
from netstorm.frontends.torch.elastic.votes import Vote, count
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup

__all__ = ["Agreement"]

_log = logging.getLogger(__name__)

_PIECE: Final = 64 * 2**20
"""Bytes of one broadcast: keys of collective calls have a largest size."""


class Agreement:
    """The comparisons of one program's state."""

    def __init__(self, group: NetStormProcessGroup, entries: Entries, *, repair: bool) -> None:
        """Compare `entries` over the ranks of a group.

        Args:
            group: of all ranks.
            entries: what is compared.
            repair: ranks that differ take over the others' state; if not, all ranks raise an error.
        """
        self._group: Final = group
        self._member: Final = group.member
        self._entries: Final = entries
        self._repair: Final = repair
        self._tensors: Final = TorchTensors()

    def reach(self, step: int, *, at_start: bool) -> tuple[int, ...]:
        """Compare the states of all ranks, and return who took part; the same at all ranks.

        Args:
            step: for messages.
            at_start: ranks may have drawn different values, so that a difference is no error.

        Raises:
            Disagreement: names the ranks whose state differs.
            NodeLost: all who had the state have left.
        """
        for _ in range(self._member.size):
            mine = digest(self._entries.compared(), self._tensors)
            digests = self._exchange(mine)
            vote = count(digests)
            if not vote.differing:
                if mine != vote.digest:  # it has just joined, so it has no vote
                    raise Disagreement(
                        f"before step {step}, the state of rank {self._member.rank} differs from that of all "
                        "others: start it again; if that does not help, a step depends on the rank"
                    )
                return tuple(sorted(digests))
            if not at_start:
                self._complain(step, vote)
            try:
                content = self._send_from(vote.source)
            except NodeLost as error:  # at all ranks
                _log.warning("the states are compared once more: %s", error)
                continue
            if mine != vote.digest:
                state = unpack(content, self._tensors)
                assert isinstance(state, dict)
                self._entries.load(state)
            return tuple(sorted(digests))
        raise NodeLost(f"every rank that was to send its state before step {step} has left the job")

    def _exchange(self, mine: int) -> dict[int, int]:
        """Return the digests of all ranks that have a vote."""
        found = torch.zeros(self._member.size, dtype=torch.int64)
        work = self._group.all_gather_single(found, torch.tensor([mine]))
        work.wait()
        assert work.contributors is not None
        return {rank: int(found[rank]) for rank in work.contributors}

    def _complain(self, step: int, vote: Vote) -> None:
        names = ", ".join(map(str, vote.differing))
        text = f"before step {step}, the state of rank {names} differs from that of rank {vote.source}"
        if not self._repair:
            raise Disagreement(
                f"{text}, which most have: something in a step depends on the rank; "
                "ElasticState(repair=True) would give them the others' state"
            )
        _log.warning("%s, which most have; they take it over", text)

    def _send_from(self, source: int) -> bytearray:
        mine = source == self._member.rank
        content = pack(self._entries.whole(), self._tensors) if mine else bytearray()
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=source, group=self._group)
        if not mine:
            content = bytearray(int(length))
        whole = torch.frombuffer(content, dtype=torch.uint8)
        for begin in range(0, len(content), _PIECE):
            dist.broadcast(whole[begin : begin + _PIECE], src=source, group=self._group)
        return content

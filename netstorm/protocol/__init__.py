"""All messages between processes, and how they are encoded in frames. Pure."""

from __future__ import annotations

from netstorm.protocol.frames import Header, open_frames, seal
from netstorm.protocol.ids import SCHEDULER, Peer, bits_of, ranks_in
from netstorm.protocol.messages import Message, Part, Phase

__all__ = [
    "SCHEDULER",
    "Header",
    "Message",
    "Part",
    "Peer",
    "Phase",
    "bits_of",
    "open_frames",
    "ranks_in",
    "seal",
]

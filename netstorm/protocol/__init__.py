"""All messages between processes, and how they are encoded in frames. Pure."""

from __future__ import annotations

from netstorm.protocol.frames import SCHEDULER, Header, Peer, bits_of, open_frames, ranks_in, seal
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

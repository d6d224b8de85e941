"""What a rank of a real job does on the tour of the code (docs/contributing/tour.md)."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch
import torch.distributed as dist

from tests.integration.torch.programs.begin import begin
from tests.tour import Calls, Place, places


def tour() -> list[list[Place]]:
    """Sum until a rate is asked for; return the calls on the ways of the first gradient, and of the rate."""
    followed = [Calls(places(table), process_of) for table in ("gradient", "rate")]

    def record(frame: FrameType, event: str, argument: object) -> None:
        for calls in followed:
            calls.record(frame, event, argument)

    threading.setprofile(record)
    _, size = begin()
    sys.setprofile(record)
    dist.all_reduce(torch.ones(1000))
    first = list(followed[0].made)
    asked = torch.zeros(1)
    while asked.item() < size:  # all ranks make the same calls
        asked.fill_(any(place.name == "progress_of" for place in followed[1].made))
        dist.all_reduce(asked)
    sys.setprofile(None)
    return [first, followed[1].made]


def process_of(_: FrameType) -> str:
    """Return the name of this process on the page."""
    return f"rank {os.environ['RANK']}"

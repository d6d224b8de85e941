"""The tour of the code (docs/contributing/tour.md) in a real job: also what the simulation has no part of."""

from __future__ import annotations

import os
import sys
import threading
from itertools import takewhile
from types import FrameType

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist

from tests.integration.torch.begin import begin
from tests.integration.torch.ranks import on_ranks
from tests.tour import Calls, check_order, missing, places


@on_ranks(2)
def test_a_gradient_and_a_rate_go_the_way_of_the_tour() -> None:
    """Sum until a rate is asked for."""
    followed = [Calls(places(table), process_of) for table in ("gradient", "rate")]

    def record(frame: FrameType, event: str, argument: object) -> None:
        for calls in followed:
            calls.record(frame, event, argument)

    threading.setprofile(record)
    os.environ["NETSTORM_SHARED_MEMORY"] = "0"  # or the kernel delivers no values, and measures nothing
    rank, size = begin()
    sys.setprofile(record)
    dist.all_reduce(torch.ones(1000))
    first = list(followed[0].made)
    of_rate = list(takewhile(lambda place: place.name != "progress_of", places("rate")))
    asked = torch.zeros(1)
    while asked.item() < size:  # all ranks make the same calls
        # sessions ask for progress, too, and other connections, maybe before all else
        asked.fill_(rank != 1 or missing(places("rate")[: len(of_rate) + 1], followed[1].made) is None)
        dist.all_reduce(asked)
    sys.setprofile(None)
    if rank == 1:
        check_order([place for place in places("gradient") if place.process == "rank 1"], first)


def process_of(_: FrameType) -> str:
    """Return the name of this process on the page."""
    return f"rank {os.environ['RANK']}"


def test_the_ten_places_exist():
    ten = places("ten")
    assert len(ten) == 10
    assert all(place.value is not None for place in ten)

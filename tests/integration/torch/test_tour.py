"""The tour of the code (docs/contributing/tour.md) in a real job: also what the simulation has no part of."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import takewhile

import pytest

from tests.tour import Place, check_order, places

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import tour


def test_a_gradient_and_a_rate_go_the_way_of_the_tour(ranks):
    ranks.start(tour.tour, 2)
    gradient, rate = ([Place(*call) for call in calls] for calls in ranks.answers()[1])
    check_order([place for place in places("gradient") if place.process == "rank 1"], gradient)
    asked = list(takewhile(lambda place: place.name != "progress_of", places("rate")))
    check_order(places("rate")[: len(asked) + 1], rate)


def test_the_ten_places_exist():
    ten = places("ten")
    assert len(ten) == 10
    assert all(place.value is not None for place in ten)

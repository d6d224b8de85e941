"""What no round of a job can be faster than, from its status."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import NetStormError
from netstorm.scheduler.bound import RoundBounds
from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.status import FailedLinkStatus, KeysStatus, LinkStatus
from tests.unit.scheduler.driving import running


def link(source, target, rate, **changed):
    values = {
        "rate": rate,
        "measured": True,
        "error": 0.01,
        "latency_s": 0.0,
        "age_s": 1.0,
        "censored": False,
    }
    return LinkStatus(source=source, target=target, **{**values, **changed})


def status(links, nbytes=1_000_000, **changed):
    """Return the status of three nodes with these links, whose last round took 1 s."""
    driven = running(3)
    found = build_status(driven.machine.snapshot(driven.now), time=0.0, scheduler="h:1", http="h:2")
    nodes = tuple(msgspec.structs.replace(node, round_s=1.0) for node in found.nodes)
    values = {"nodes": nodes, "links": tuple(links), "keys": KeysStatus(count=1, bytes=nbytes), **changed}
    return msgspec.structs.replace(found, **values)


def mesh(slow=10e6):
    """Return links of 100 Mbit/s, and those of rank 2."""
    ends = [(a, b) for a in range(3) for b in range(3) if a != b]
    return [link(a, b, slow if 2 in (a, b) else 100e6) for a, b in ends]


def test_it_names_the_node_whose_links_are_the_limit_and_says_how_near_the_last_round_was():
    bound = RoundBounds().of(status(mesh()))
    assert bound is not None
    assert bound.seconds == pytest.approx(8e6 / 20e6, rel=1e-3)  # all must pass rank 2's two links
    assert "everything must pass between rank 2 and the other nodes" in str(bound)
    assert str(bound).endswith("the last one took 1 s, 40% of it")


def test_assumed_rates_are_said():
    links = [*mesh()[:-1], link(2, 1, 10e6, measured=False)]
    assert "(rates of 1 of 6 links are assumed)" in str(RoundBounds().of(status(links)))


def test_latency_alone_can_be_the_bound():
    links = [msgspec.structs.replace(one, latency_s=0.5) for one in mesh()]
    bound = RoundBounds().of(status(links, nbytes=100))
    assert bound is not None
    assert bound.seconds >= 0.5


def test_a_link_that_has_failed_is_none():
    failed = tuple(
        FailedLinkStatus(source=a, target=b, reason="cut", since_s=1.0) for a, b in ((2, 0), (0, 2))
    )
    bound = RoundBounds().of(status(mesh(), failed_links=failed))
    assert bound is not None
    assert bound.seconds == pytest.approx(8e6 / 10e6, rel=1e-3)


@pytest.mark.parametrize("why", ["nothing measured", "no keys", "compressed", "a free rank", "separated"])
def test_without_what_it_needs_there_is_none(why):
    found = status(mesh())
    match why:
        case "nothing measured":
            links = tuple(msgspec.structs.replace(one, measured=False) for one in found.links)
            found = msgspec.structs.replace(found, links=links)
        case "no keys":
            found = status(mesh(), nbytes=0)
        case "compressed":
            nodes = (msgspec.structs.replace(found.nodes[0], compression="int8"), *found.nodes[1:])
            found = msgspec.structs.replace(found, nodes=nodes)
        case "a free rank":
            found = msgspec.structs.replace(found, nodes=found.nodes[1:])
        case "separated":
            found = status([one for one in mesh() if 2 not in (one.source, one.target)])
    assert RoundBounds().of(found) is None


def test_it_is_computed_anew_after_a_while_or_if_the_links_are_others():
    bounds = RoundBounds()

    def seconds(rate, time, links=None):
        found = bounds.of(msgspec.structs.replace(status(links or mesh(rate)), time=time))
        return None if found is None else round(found.seconds, 2)

    assert seconds(10e6, 0.0) == 0.4
    assert seconds(20e6, 1.0) == 0.4
    assert seconds(20e6, 11.0) == 0.2
    assert seconds(20e6, 12.0, mesh(20e6)[1:]) == 0.4
    assert seconds(40e6, 12.5) == 0.1


def test_an_optimum_that_is_not_found_ends_no_view(monkeypatch):
    def fails(*_):
        raise NetStormError("the linear program of the optimum was not solved")

    monkeypatch.setattr("netstorm.topology.resources.optimum", fails)
    assert RoundBounds().of(status(mesh())) is None

from __future__ import annotations

import pytest

from netstorm.cli.launch.variables import HostPlace, Master, given_or, places, port_beside, torch_variables


def test_ranks_are_counted_on_each_host():
    found = [(one.local_rank, one.local_size) for one in places(["a", "b", "a", "a"])]
    assert found == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_without_an_address_of_rank_0_pytorch_gets_ranks_alone():
    place = HostPlace(local_rank=0, local_size=1)
    assert torch_variables(rank=1, size=3, place=place, master=None) == {
        "RANK": 1,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }


def test_what_the_user_sets_is_kept_and_the_rest_found():
    found = Master(address="10.0.0.1", port=29_500)
    assert given_or({}, found) == found
    assert given_or({"MASTER_PORT": "7"}, found) == Master(address="10.0.0.1", port=7)
    assert given_or({"MASTER_ADDR": "host", "MASTER_PORT": ""}, found) == Master(address="host", port=29_500)


@pytest.mark.parametrize(
    ("scheduler", "fresh", "port"),
    [(None, True, 29_500), (29_500, True, 29_501), (9091, False, 10_091), (65_535, False, 64_535)],
)
def test_pytorchs_port_is_never_the_schedulers(scheduler, fresh, port):
    assert port_beside(scheduler, fresh_host=fresh) == port

from __future__ import annotations

import pytest

from netstorm.cli.launch.variables import Master, given_or, port_beside, variables_of_nodes


def of_nodes(hosts, master=None):
    return variables_of_nodes(hosts, [None] * len(hosts), scheduler="s", port=None, master=master)


def test_ranks_are_counted_on_each_host():
    local = [(own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) for own in of_nodes(["a", "b", "a", "a"])]
    assert local == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_without_an_address_of_rank_0_pytorch_gets_ranks_alone():
    assert of_nodes(["a", "b", "c"])[1] == {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "s",
        "DMLC_NUM_WORKER": 3,
        "NETSTORM_RANK": 1,
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

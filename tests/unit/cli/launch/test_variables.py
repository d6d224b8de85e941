from __future__ import annotations

import pytest

from netstorm.cli.launch.variables import Master, given_or, usual_port, variables_of_nodes
from netstorm.launchers import port_beside


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
    ("choose", "scheduler", "port"),
    [
        (usual_port, None, 29_500),
        (usual_port, 29_500, 29_501),
        (port_beside, 9091, 10_091),
        (port_beside, 65_535, 64_535),
    ],
)
def test_pytorchs_port_is_never_the_schedulers(choose, scheduler, port):
    assert choose(scheduler) == port

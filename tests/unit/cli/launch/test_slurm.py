"""What `netstorm launch --slurm` makes of an allocation's variables."""

from __future__ import annotations

import pytest

from netstorm.cli.launch.slurm import meeting_place, placements_in, slots_of, through_srun
from netstorm.errors import UsageError

ALLOCATION = {"SLURM_JOB_NODELIST": "node[1-2],gpu", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "7"}


def hosts_of(nodes: str) -> list[str]:
    return {"node[1-2],gpu": ["node1", "node2", "gpu"]}[nodes]


def test_ranks_are_placed_in_the_order_of_slurms_nodes():
    placed = [(one.rank, one.host) for one in placements_in(ALLOCATION, hosts_of)]
    assert placed == [(0, "node1"), (1, "node1"), (2, "node2"), (3, "node2"), (4, "gpu")]


def test_an_allocation_that_says_nothing_of_tasks_has_one_a_node():
    variables = {name: value for name, value in ALLOCATION.items() if "TASKS" not in name}
    assert [one.host for one in placements_in(variables, hosts_of)] == ["node1", "node2", "gpu"]


def test_slurms_short_form_of_tasks():
    assert slots_of("12") == [12]
    assert slots_of("2(x3),1,4(x2)") == [2, 2, 2, 1, 4, 4]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_JOB_NODELIST": ""}, ["SLURM_JOB_NODELIST", "sbatch", "salloc", "--hosts"]),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, ["SLURM_TASKS_PER_NODE=2(x2)", "each of 3 nodes"]),
        ({"SLURM_TASKS_PER_NODE": "two"}, ["'two'", "2(x3),1"]),
        ({"SLURM_TASKS_PER_NODE": "0(x3)"}, ["'0(x3)'"]),
    ],
)
def test_variables_that_cannot_be_used_are_named(variables, words):
    with pytest.raises(UsageError) as caught:
        placements_in(ALLOCATION | variables, hosts_of)
    assert all(word in str(caught.value) for word in words), caught.value


def test_another_job_and_a_job_that_is_queued_again_meet_elsewhere():
    meetings = [
        meeting_place(ALLOCATION | other)
        for other in ({}, {"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "1"})
    ]
    assert len({port for port, _ in meetings}) == len({job for _, job in meetings}) == 3
    assert meetings[0][1] == "slurm-launch.7.0"


def test_srun_starts_one_task_on_the_node_that_is_asked_for():
    command = through_srun("gpu", ["python", "-c", "two words"])
    assert command[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--overlap", "--nodelist=gpu"} <= set(command)
    assert command[-3:] == ("python", "-c", "two words")

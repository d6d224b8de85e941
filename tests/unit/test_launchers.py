"""What MPI's and Slurm's launchers say of a process. The variables are those of real launchers' processes."""

from __future__ import annotations

import os

import pytest

from netstorm.errors import UsageError
from netstorm.launchers import first_host, place_of_this_process, settings_below, take_place
from netstorm.pslite.host_addresses import own_addresses
from netstorm.settings import Settings

OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1445265408.0;tcp://192.0.2.7,10.0.0.7:52987;tcp6://[fd00::2]:55393",
    "PMIX_NAMESPACE": "1445265409",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "node2",
}
OPEN_MPI_5 = {
    **{name: value for name, value in OPEN_MPI_4.items() if "MCA" not in name},
    "PMIX_NAMESPACE": "prterun-node-1-15345@1",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def taken(monkeypatch):
    """Return a function that has a process with these variables take its place: (what it starts, its
    variables then).
    """

    def take(*environments, **variables):
        environment = {name: value for each in environments for name, value in each.items()} | variables
        monkeypatch.setattr(os, "environ", environment)
        place = place_of_this_process()
        assert place is not None
        return take_place(place, settings_below(place)), environment

    return take


@pytest.mark.parametrize(
    ("launcher", "rank", "size", "host"),
    [(OPEN_MPI_4, "1", "4", "192.0.2.7"), (OPEN_MPI_5, "1", "4", "node-1"), (SLURM, "2", "4", "node07")],
)
def test_a_rank_on_another_host_looks_for_the_scheduler_on_that_of_rank_0(taken, launcher, rank, size, host):
    starts, variables = taken(launcher)
    assert starts is None
    assert (variables["NETSTORM_RANK"], variables["DMLC_NUM_WORKER"]) == (rank, size)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == (rank, size, host)
    assert variables["DMLC_PS_ROOT_URI"] == host
    assert int(variables["MASTER_PORT"]) == int(variables["DMLC_PS_ROOT_PORT"]) + 1000
    Settings.from_environment(variables)  # the job's name is one, too


def test_all_ranks_agree_on_port_and_job_and_other_starts_on_others(taken):
    def meeting(**variables):
        taken_variables = taken(SLURM, **variables)[1]
        return taken_variables["DMLC_PS_ROOT_PORT"], taken_variables["NETSTORM_JOB"]

    first = meeting()
    assert meeting(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="1") == first
    others = {meeting(SLURM_STEP_ID="1"), meeting(SLURM_JOB_ID="8"), meeting(SLURM_RESTART_COUNT="1")}
    assert len({port for port, _ in {first, *others}}) == len({job for _, job in {first, *others}}) == 4


def test_rank_0_starts_the_scheduler_and_on_one_host_at_loopback(taken):
    starts, variables = taken(SLURM, SLURM_PROCID="0", SLURM_NODEID="0")
    assert starts == ("node07", int(variables["DMLC_PS_ROOT_PORT"]))
    assert "LOCAL_WORLD_SIZE" not in variables
    starts, variables = taken(OPEN_MPI_4, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert starts == ("127.0.0.1", int(variables["DMLC_PS_ROOT_PORT"]))
    assert (variables["MASTER_ADDR"], variables["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "4")


def test_rank_0_on_the_host_of_mpirun_starts_it_there(taken):
    address = own_addresses()[0] if own_addresses() else "127.0.0.1"
    uri = f"1.0;tcp://{address}:52987" if ":" not in address else f"1.0;tcp6://[{address}]:52987"
    starts, _ = taken(OPEN_MPI_4, OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_hnp_uri=uri)
    assert starts is not None
    assert starts[0] == address
    starts, _ = taken(OPEN_MPI_5, OMPI_COMM_WORLD_RANK="0", PMIX_HOSTNAME="node-1")
    assert starts is not None
    assert starts[0] == "node-1"


def test_a_named_scheduler_and_what_torchrun_has_set_are_kept(taken):
    starts, variables = taken(SLURM, SLURM_PROCID="0", DMLC_PS_ROOT_URI="10.0.0.1")
    assert (starts, variables["DMLC_PS_ROOT_URI"], variables["NETSTORM_RANK"]) == (None, "10.0.0.1", "0")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node07", "10091")
    assert "NETSTORM_JOB" not in variables
    for given in (
        {"RANK": "9", "WORLD_SIZE": "16"},
        {"NETSTORM_RANK": "9", "DMLC_NUM_WORKER": "16"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "DMLC_NUM_WORKER": "3"},  # in a shell of srun's
    ):
        starts, variables = taken(SLURM, given)
        assert (starts, variables) == (None, {**SLURM, **given})


def test_mpirun_below_slurm_says_the_rank(taken):
    assert taken(SLURM, OPEN_MPI_4)[1]["NETSTORM_RANK"] == "1"
    place_variables = taken(SLURM, PMI_RANK="2", PMI_SIZE="4")[1]  # srun --mpi=pmi2
    assert (place_variables["NETSTORM_RANK"], place_variables["DMLC_PS_ROOT_URI"]) == ("2", "node07")


@pytest.mark.parametrize(
    ("launcher", "variables", "words"),
    [
        (SLURM, {"NETSTORM_RANK": "4"}, ["NETSTORM_RANK=4", "from 0 to 3"]),
        (SLURM, {"NETSTORM_RANK": "3"}, ["NETSTORM_RANK=3", "SLURM_PROCID=2"]),
        (SLURM, {"DMLC_NUM_WORKER": "8"}, ["DMLC_NUM_WORKER=8", "SLURM_STEP_NUM_TASKS=4"]),
        (OPEN_MPI_4, {"RANK": "0"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
        (OPEN_MPI_4, {"OMPI_COMM_WORLD_SIZE": "x"}, ["OMPI_COMM_WORLD_SIZE='x'"]),
        (OPEN_MPI_4, {"OMPI_COMM_WORLD_RANK": "0"}, ["rank 0", "192.0.2.7", "DMLC_PS_ROOT_URI"]),
        (OPEN_MPI_5, {"PMIX_NAMESPACE": "other"}, ["several hosts", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"]),
        (PMI, {}, ["mpiexec", "DMLC_PS_ROOT_URI"]),  # no process of Hydra's is above this one
        ({"PMIX_RANK": "0"}, {}, ["PMIX_RANK=0", "DMLC_NUM_WORKER"]),
    ],
)
def test_what_contradicts_or_does_not_suffice_is_an_error_that_says_what_to_set(
    taken, launcher, variables, words
):
    with pytest.raises(UsageError) as caught:
        taken(launcher, variables)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}])
def test_without_a_launcher_and_in_a_batch_script_there_is_no_place(monkeypatch, variables):
    monkeypatch.setattr(os, "environ", variables)
    assert place_of_this_process() is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[03-05,07],gpu1", "node03"),
        ("gpu1,node[1-2]", "gpu1"),
        ("rack[2-3]n[10,12]-ib", "rack2n10-ib"),
        ("vm", "vm"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_nodes(nodes, host):
    assert first_host(nodes) == host

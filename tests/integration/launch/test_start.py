from __future__ import annotations

import json
import os
import socket
from importlib.util import find_spec

import pytest

from netstorm.cli.launch.variables import free_port, is_free

SAY_ALL = """
import json
print(json.dumps({"folder": os.getcwd(), "arguments": sys.argv[1:], "input": sys.stdin.read(), **os.environ}))
"""


def test_each_node_knows_who_it_is_and_has_its_folder_and_arguments(launcher):
    scratch = launcher.folder / "scratch"
    (launcher.folder / "deep").mkdir()
    scratch.mkdir()
    words = launcher.words("-n", "2", "--port", "4711", "--site", "east,west", "--env", "LR=a b=$c")
    words[words.index("--")] = "--chdir=deep"  # what follows a command is its own, also without the dashes
    launcher.words = lambda: [*words, "-n", "5", "--port", "x"]
    ended = launcher.run(SAY_ALL, TMPDIR=str(scratch))
    assert (ended.code, ended.err) == (0, "")
    assert list(scratch.iterdir()) == []
    nodes = [json.loads(line[4:]) for line in sorted(ended.out.splitlines())]
    for rank, site in enumerate(["east", "west"]):
        expected = {
            "DMLC_ROLE": "worker",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "4711",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NODE_HOST": "127.0.0.1",
            "NETSTORM_RANK": str(rank),
            "NETSTORM_SITE": site,
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2))
            ),
            "LR": "a b=$c",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "folder": str(launcher.folder / "deep"),
            "arguments": ["-n", "5", "--port", "x"],
            "input": "",
        }
        assert {name: nodes[rank][name] for name in expected} == expected
    assert nodes[0]["MASTER_PORT"] == nodes[1]["MASTER_PORT"]


def test_a_port_for_pytorch_is_one_at_which_nobody_listens():
    port = free_port()
    assert is_free(port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
    assert is_free(port)


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_pytorchs_own_backends_start_from_the_launchers_variables_with_a_store_on_loopback_alone(launcher):
    program = """
import psutil
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(total)
port = int(os.environ["MASTER_PORT"])
listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
store = {one.ip for one in listening if one.port == port}
print(dist.get_rank() == rank, dist.get_world_size(), total.tolist(), store)
dist.barrier()
dist.destroy_process_group()
"""
    ended = launcher.run(program, "-n", "2", TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT="1", RANK="5")
    assert sorted(ended.out.splitlines()) == [
        f"[{rank}] True 2 [3.0, 3.0] {{'127.0.0.1'}}" for rank in range(2)
    ], ended.err

"""The link between two nodes is cut for good while they train: the job goes on without it, and ends right."""

from __future__ import annotations

from pathlib import Path

from netstorm.errors import FrameError
from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.protocol.frames import PROTOCOL_VERSION, open_frames
from netstorm.protocol.messages import Hello
from tests.integration.failures.descent import SCRIPT, end_with_the_right_weights, wait_for_steps
from tests.integration.jobs import Job, free_port

_BEGIN = b"NS" + bytes([PROTOCOL_VERSION])


def is_from(rank: int, data: bytes) -> bool:
    """Return whether a rank introduces itself in `data`, as it came from a socket."""
    at = data.find(_BEGIN)
    while at > 0:
        try:
            message = open_frames(data[at : at + data[at - 1]], 1).message  # the byte before is the length
        except FrameError:
            message = None
        if isinstance(message, Hello) and message.sender == rank:
            return True
        at = data.find(_BEGIN, at + 1)
    return False


def test_training_goes_on_around_a_pair_that_is_cut_for_good(tmp_path: Path) -> None:
    port = free_port()
    settings = {
        "NETSTORM_LINK_TIMEOUT": 3,
        "NETSTORM_LINK_RETRY": 1,
        "PS_HEARTBEAT_INTERVAL": 0.5,
        "PS_HEARTBEAT_TIMEOUT": 60,
    }
    with TcpProxy("127.0.0.1", port) as proxy, Job(tmp_path, 4, **settings) as job:
        for rank in range(4):
            where = {"NETSTORM_PORT": port, "NETSTORM_ADVERTISED_PORT": proxy.port} if rank == 2 else {}
            job.start(rank, SCRIPT, **where)
        wait_for_steps(job, 0, 10)
        proxy.refuses = lambda data: is_from(0, data)
        proxy.cut()
        job.wait_until_said(-1, "the job goes on without it")
        wait_for_steps(job, 0, 20)
        proxy.refuses = None
        job.wait_until_said(-1, "works again")
        wait_for_steps(job, 0, 10)
        ended = end_with_the_right_weights(job)
    assert "the link to rank 2 (127.0.0.1:" in ended[0].err
    assert "has failed; traffic to it goes over ranks " in ended[0].err

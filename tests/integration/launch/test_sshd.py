"""`netstorm launch --hosts` through a real ssh and a real sshd, on loopback."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from netstorm.cli.launch.variables import free_port
from tests.integration.dashboard.chromium import first_update
from tests.integration.jobs import PYTHONPATH
from tests.integration.launch.launcher import PATIENCE_S, Launcher, ended, inside, until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = pytest.mark.slow
if SSHD is None or shutil.which("ssh") is None:
    pytest.skip("no sshd or no ssh: apt install openssh-server openssh-client", allow_module_level=True)

SUM = """
import json
import numpy as np
import netstorm
group = netstorm.Group()
total = group.allreduce(np.full(3, group.rank + 1.0))
site, scheduler = (os.environ[name] for name in ("NETSTORM_SITE", "DMLC_PS_ROOT_URI"))
print(group.rank, total[0], site, scheduler, os.environ["SSH_CONNECTION"].split()[2])
secret = json.loads(pathlib.Path(os.environ["NETSTORM_KEY_FILE"]).read_bytes())["secret"]
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
print("secrets in command lines:", sum(secret.encode() in line for line in lines))
group.barrier()
"""


class Server:
    """An sshd of one test's own, on loopback, and the client's configuration that knows it as two hosts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        for name in ("host", "user", "stranger"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(keygen, check=True, timeout=60)
        self.port = free_port()
        (folder / "sshd").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder}/host\n"
            f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            f"SetEnv PYTHONPATH={PYTHONPATH}\n"  # stands for NetStorm being installed there
        )
        host_key = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"netstorm-test {host_key}")
        self.client = folder / "client"
        self.client.write_text(
            "Host tokyo\n  HostName 127.0.0.1\nHost paris\n  HostName 127.0.0.2\n"
            f"Host *\n  Port {self.port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/user\n"
            f"  IdentitiesOnly yes\n  HostKeyAlias netstorm-test\n  UserKnownHostsFile {folder}/known\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # root's sshd wants it, even empty
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd")], stderr=log)

    def sessions(self) -> list[psutil.Process]:
        """Return the processes that serve connections."""
        return [
            each
            for each in psutil.Process(self.process.pid).children(recursive=True)
            if "sshd" in each.name()
        ]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ssh") / "own")
    deadline = time.monotonic() + PATIENCE_S
    while "Server listening on 127.0.0.2" not in server.log.read_text():
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield server
    server.stop()


@pytest.fixture
def two_hosts(launcher, server):
    """The launcher, whose nodes are on two hosts that are this one."""
    (launcher.folder / "hosts").write_text(
        "tokyo slots=2 site=east address=127.0.0.1\nparis site=west address=127.0.0.2\n"
    )
    launcher.words = lambda *options: [
        *("netstorm", "launch", "--hosts", "hosts", "--python", sys.executable),
        *("--ssh", f"ssh -F {server.client}", "--port", str(free_port()), *options),
        *("--", "python", "-u", str(launcher.program)),
    ]
    return launcher


def test_a_job_on_two_hosts_sums_up_and_its_key_is_on_no_command_line(two_hosts: Launcher) -> None:
    end = two_hosts.run(SUM)
    assert end.code == 0, end.err
    said = sorted(line for line in end.out.splitlines() if " 6.0 " in line)
    sums = [("0", "east", "127.0.0.1"), ("1", "east", "127.0.0.1"), ("2", "west", "127.0.0.2")]
    assert said == [f"[{rank}] {rank} 6.0 {site} 127.0.0.1 {host}" for rank, site, host in sums]
    assert end.out.count("secrets in command lines: 0") == 3


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="the extra dashboard is not installed")
def test_a_page_here_shows_a_job_elsewhere_and_ends_with_it(two_hosts: Launcher) -> None:
    program = "import netstorm\nwith netstorm.Group() as group:\n    time.sleep(600)"
    with two_hosts.started(program, "--dashboard") as process:
        printed = re.compile(r"\[dashboard\] netstorm dashboard: (http://127.0.0.1:\S+)")
        until(lambda: printed.search(process.said()[0]), "the address of the page")
        found = printed.search(process.said()[0])
        assert found is not None
        nodes = first_update(found[1], nodes=3)["frame"]["nodes"]
        assert [node["site"] for node in nodes] == ["east", "east", "west"]
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        until(lambda: not inside(two_hosts.folder), "the remote processes to end")
        with pytest.raises(urllib.error.URLError, match="refused"):
            first_update(found[1])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_launcher_that_is_interrupted_or_killed(
    two_hosts: Launcher, stop: signal.Signals
) -> None:
    program = "subprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    with two_hosts.started(program, "--no-scheduler") as process:
        two_hosts.wait_for_pids(3)
        process.send_signal(stop)
        code = process.wait(PATIENCE_S)
        until(lambda: not inside(two_hosts.folder), "the remote processes to end")
    assert code == (130 if stop == signal.SIGINT else -signal.SIGKILL)


def test_a_connection_that_its_server_loses_ends_the_rank_and_the_job_says_where(
    two_hosts: Launcher, server: Server
) -> None:
    with two_hosts.started("time.sleep(600)", "--no-scheduler", "--grace", "0.2") as process:
        two_hosts.wait_for_pids(3)
        for session in server.sessions():
            session.kill()
        end = ended(process)
        until(lambda: not inside(two_hosts.folder), "the remote processes to end")
    assert end.code == 255
    assert "on tokyo failed with exit code 255 (ssh's own code" in end.err or "on paris failed" in end.err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("UserKnownHostsFile=/dev/null", "Host key verification failed"),
        ("IdentityFile={folder}/stranger", "Permission denied (publickey"),
    ],
)
def test_a_host_or_user_that_is_not_known_is_an_error_and_no_question(
    two_hosts: Launcher, server: Server, option: str, words: str
) -> None:
    folder, name = server.client.parent, option.partition("=")[0]
    known = [line for line in server.client.read_text().splitlines() if name not in line]
    server.client.write_text("\n".join([*known, f"  {option.format(folder=folder)}\n"]))
    (two_hosts.folder / "hosts").write_text("tokyo\n")
    end = two_hosts.run("", "--no-scheduler")
    assert end.code == 255
    assert words in end.err
    assert "ssh's own code when it cannot connect" in end.err

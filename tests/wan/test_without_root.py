"""Networks that are emulated without root, in a user namespace; `netstorm demo` in one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from netstorm.lab.emulation import Wan
from netstorm.lab.emulation.namespaces import without_root
from tests.integration.dashboard.chromium import first_update
from tests.wan.traces import LINE, NETSTORM, network

NO_RIGHTS = ("setpriv", "--bounding-set=-sys_admin,-net_admin,-dac_override", "--inh-caps=-all")
"""Takes from a command what emulating a network needs, as an ordinary user lacks it."""


@pytest.fixture(autouse=True)
def _user_namespaces() -> None:
    words = [*NO_RIGHTS, "unshare", "--user", "--map-root-user", "true"]
    if shutil.which("setpriv") is None or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no setpriv, or users may not have namespaces here")


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*NO_RIGHTS, *NETSTORM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="the extra dashboard is not installed")
def test_a_user_who_is_not_root_runs_a_job_in_an_emulated_network_and_sees_it_from_outside(tmp_path):
    (tmp_path / "line.yaml").write_text(LINE)
    script = (
        "import time, netstorm\nwith netstorm.Group() as group:\n    group.barrier()\n    time.sleep(600)\n"
    )
    (tmp_path / "wait.py").write_text(script)
    options = ("--wan", "line.yaml", "--dashboard", "--grace", "1")
    # Root has a network up, too, and with it a folder in /etc in which nobody else may write.
    with Wan.up(network()), started(tmp_path, "launch", *options, "--", "python", "wait.py") as job:
        assert job.stdout is not None
        found = next(filter(None, (re.search(r"netstorm dashboard: (\S+)", line) for line in job.stdout)))
        assert [node["site"] for node in first_update(found[1], nodes=3)["frame"]["nodes"]] == ["a", "b", ""]
        job.send_signal(signal.SIGINT)
        job.stdout.read()
        assert job.wait(60) == 130
    assert not list(Path("/etc/netns").glob(f"netstorm-{job.pid}.*"))


@pytest.mark.slow
def test_the_demo_trains_in_an_empty_folder_without_root(tmp_path):
    with started(tmp_path, "demo", "--seconds", "2") as demo:
        said, _ = demo.communicate(timeout=110)
    assert demo.returncode == 0, said
    assert "an emulated network of 4 nodes and 12 links" in said
    assert "the weights of all 4 nodes are the same, byte for byte" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_says_what_is_missing_and_trains_on_loopback(tmp_path):
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("setpriv", "ip", "tc"):  # and no unshare
        (path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        [*NO_RIGHTS, *NETSTORM, "demo", "--seconds", "1"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={"PATH": str(path), "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are emulated as soon as\nthis is there: CAP_NET_ADMIN and CAP_SYS_ADMIN" in done.stdout
    assert "the weights of all 4 nodes are the same, byte for byte" in done.stdout


def test_who_may_emulate_networks_needs_no_namespaces_of_a_user():
    assert without_root() == ()

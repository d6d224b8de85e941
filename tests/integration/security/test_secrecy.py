"""The secret of a job is in its key file and nowhere else, while a job runs and after it."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from netstorm.pslite.keys import JobKey, key_text
from tests.integration.forking import ROOT
from tests.integration.jobs import run_netstorm

NODE = """
import pathlib, sys, time
import numpy as np
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation

runtime = runtime_of_this_process()
key = runtime.register(0, "w", (1000,), "float32")
values = np.ones(1000, np.float32)
for round in range(2):
    runtime.allreduce(
        Operation(key=key, round=round, source=values.copy(), destination=values, done=lambda _: None)
    )
print("two rounds", values[0], runtime.counters.snapshot(), flush=True)
while not pathlib.Path(sys.argv[0]).with_name("stop").exists():
    time.sleep(0.02)
runtime.finish()
raise RuntimeError(f"a crash with {runtime.settings} and {runtime.process.cluster_clock.__dict__}")
"""


def forms(key: JobKey) -> dict[str, bytes]:
    """Return a secret, and those that are derived from it, in every form in which somebody may write it."""
    found: dict[str, bytes] = {}
    for name, secret in (
        ("the secret", key.secret),
        ("curve", key.curve_keys().secret),
        ("curve, public part", key.curve_keys().public),
        ("sntp", key.derive("sntp")),
        ("processes", key.derive("processes")),
    ):
        found |= {
            f"{name}, raw": secret,
            f"{name}, Z85": key_text(secret).encode(),
            f"{name}, hex": secret.hex().encode(),
            f"{name}, HEX": secret.hex().upper().encode(),
            f"{name}, base64": base64.b64encode(secret).rstrip(b"="),
            f"{name}, base64 of URLs": base64.urlsafe_b64encode(secret).rstrip(b"="),
            f"{name}, as Python writes it": repr(secret)[2:-1].encode(),
        }
    return found


def leaks(key: JobKey, places: dict[str, bytes]) -> list[str]:
    """Return where the secret is, in which form."""
    return [
        f"{form} in {place}"
        for form, text in forms(key).items()
        for place, content in places.items()
        if text in content
    ]


def of_processes(processes: list[psutil.Process]) -> Iterator[tuple[str, bytes]]:
    for process in processes:
        for name in ("cmdline", "environ", "comm", "maps"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                yield f"/proc/{process.pid}/{name}", Path(f"/proc/{process.pid}/{name}").read_bytes()


def of_pages(said: str) -> Iterator[tuple[str, bytes]]:
    address = said.partition("netstorm top --scheduler ")[2].split()[0]
    for page in ("/", "/status.json", "/metrics"):
        with urllib.request.urlopen(f"http://{address}{page}", timeout=60) as answer:
            yield page, answer.read()


def env_of(folder: Path, variables: dict[str, str]) -> bytes:
    return b"".join(
        run_netstorm(folder, "env", *options, **variables).text.encode() for options in ((), ("--json",))
    )


@contextlib.contextmanager
def launched(folder: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job of two nodes, which end once there is a file `stop`; what is said goes to a file `said`."""
    (folder / "node.py").write_text(NODE)
    command = [sys.executable, "-m", "netstorm", "launch", "-n", "2", "--log-dir", str(folder / "logs")]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, "--", sys.executable, str(folder / "node.py")],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        process.terminate()  # it ends its job
        process.wait(60)


def test_the_key_of_a_launched_job_is_in_no_log_trace_page_command_line_or_variable(tmp_path):
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "NETSTORM_LOG": "debug",
        "PS_VERBOSE": "2",
        "NETSTORM_TRACE": str(tmp_path / "trace.json"),
        "NETSTORM_STATE_DIR": str(tmp_path / "state"),
        "NETSTORM_CLOCK": "trees",
    }
    with launched(tmp_path, variables) as launcher:
        said = tmp_path / "said"
        deadline = time.monotonic() + 90
        while said.read_text().count("two rounds 4.0") < 2:
            assert launcher.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        key_files = {process.environ().get("NETSTORM_KEY_FILE", "") for process in processes} - {""}
        assert len(key_files) == 1
        (key_file,) = key_files
        assert Path(key_file).stat().st_mode & 0o777 == 0o600
        key = JobKey.load(Path(key_file))
        places = {"netstorm env": env_of(tmp_path, {**variables, "NETSTORM_KEY_FILE": key_file})}
        places |= of_processes(processes)
        places |= of_pages(said.read_text())
        (tmp_path / "stop").touch()
        assert launcher.wait(60) == 1
    assert not Path(key_file).exists()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    places |= {str(path): path.read_bytes() for path in files}
    names = {path.name for path in files}
    assert {"said", "trace.0.json", "trace.1.json", "default.log", "rank-0.log", "scheduler.log"} <= names
    assert b"a crash with" in places[str(said)]
    assert len(processes) >= 4
    assert leaks(key, places) == []
    program = f"import os, shutil; shutil.copy(os.environ['NETSTORM_KEY_FILE'], r'{tmp_path / 'next.key'}')"
    run_netstorm(tmp_path, "launch", "-n", "1", "--", sys.executable, "-c", program)
    assert JobKey.load(tmp_path / "next.key") != key, "each job has another one"


@pytest.mark.parametrize("form", forms(JobKey(bytes(range(32)))))
def test_a_secret_that_was_written_somewhere_would_be_found(form):
    key = JobKey(bytes(range(32)))
    assert leaks(key, {"log": b"before" + forms(key)[form] + b"after"})

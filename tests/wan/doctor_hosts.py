"""Two hosts and a router between them, in network namespaces, for the doctor: each misconfigured as asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.forking import ROOT, ForkedProcess, Forker

ADDRESS = {"a": "10.78.0.1", "b": "10.78.1.1"}
LIMIT_S = 90
PLAIN_HOSTS = "127.0.0.1 localhost\n10.78.0.1 nodea\n10.78.1.1 nodeb\n10.78.0.254 noder\n"
PLAIN_FILES = {
    "/etc/hosts": PLAIN_HOSTS,
    "/etc/resolv.conf": "\n",
    "/etc/nsswitch.conf": "hosts: files dns\n",
}


@dataclass(frozen=True)
class Host:
    """How one host's processes are started."""

    variables: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    """Path to the text that stands there for these processes alone."""
    shell: str = ""
    """Commands before, in a mount namespace of their own."""
    patch: str = ""
    """Python in front of the program: limits, and what no namespace can give it, such as another clock."""
    options: tuple[str, ...] = ()


@dataclass
class Doctors:
    """The namespaces, and the processes in them. A context manager: nothing survives it."""

    folder: Path
    forker: Forker
    processes: list[ForkedProcess] = field(default_factory=list)
    _files: int = 0

    def __enter__(self) -> Doctors:  # noqa: PYI034 -- Self is Python 3.11's
        for name in "abr":
            subprocess.run(["ip", "netns", "add", self.namespace(name)], check=True)
            self.ip(name, "link set lo up")
        for number, host in enumerate("ab"):
            self.ip("r", f"link add to-{host} type veth peer name w netns {self.namespace(host)}")
            self.ip("r", f"address add 10.78.{number}.254/24 dev to-{host}")
            self.ip("r", f"link set to-{host} up")
            self.ip(host, f"address add {ADDRESS[host]}/24 dev w")
            self.ip(host, "link set w up")
            self.ip(host, f"route add default via 10.78.{number}.254")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", self.namespace("r"), "sh", "-c", forward], check=True)
        self.ip("r", "rule add pref 100 table local")  # so that rules before it can drop packets for ports
        self.ip("r", "rule del pref 0")
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_all()
        for name in "abr":
            subprocess.run(["ip", "netns", "del", self.namespace(name)], check=False)

    def namespace(self, name: str) -> str:
        return f"doctor-{os.getpid()}-{name}"

    def ip(self, name: str, words: str) -> None:
        subprocess.run(["ip", "-n", self.namespace(name), *words.split()], check=True)

    def start(self, name: str, host: Host, *words: str) -> tuple[ForkedProcess, Path, Path]:
        """Start the program on a host; return it, and the files of its output and errors."""
        self._files += 1
        mounts = {}
        for number, (path, text) in enumerate({**PLAIN_FILES, **dict(host.files)}.items()):
            mounts[path] = str(self.folder / f"mount-{self._files}-{number}")
            Path(mounts[path]).write_text(text)
        out, err = (self.folder / f"{kind}-{self._files}" for kind in ("out", "err"))
        out.touch()  # the process may not have begun when it is read
        err.touch()
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        process = ForkedProcess(
            self.forker,
            namespace=self.namespace(name),
            host=f"node{name}",
            environment={**kept, "PYTHONPATH": str(ROOT), **dict(host.variables)},
            files=mounts,
            shell=host.shell,
            patch=host.patch,
            words=words,
            out=str(out),
            err=str(err),
        )
        self.processes.append(process)
        return process, out, err

    def end_all(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(LIMIT_S)
        self.processes.clear()

    def findings(self, name: str, host: Host, *words: str) -> list[dict[str, str]]:
        """Run the doctor on a host, and return its findings."""
        quick = [] if "frameworks" in host.options else ["--quick"]
        process, out, err = self.start(name, host, "doctor", *quick, "--json", *words)
        code = process.wait(LIMIT_S)
        assert code in {0, 1}, err.read_text()
        found: list[dict[str, str]] = json.loads(out.read_text())["findings"]
        assert code == any(one["severity"] != "ok" for one in found)
        return found

    def wait_until_said(self, started: tuple[ForkedProcess, Path, Path], text: str) -> None:
        """Wait until a process has written `text`."""
        process, out, err = started
        deadline = time.monotonic() + LIMIT_S
        while text not in (said := out.read_text() + err.read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.01)

"""A process that forks while it sends. Reads commands from stdin, answers on stdout; see test_fork.py."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time

from netstorm.errors import Closed
from netstorm.lab.testing.recorder import part
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Send
from tests.integration.pslite.processes import RealProcess, wait_until


def child_of(process: RealProcess, seconds: float, how: str) -> None:
    """Be a forked child: find out that the store is of no use, live for a while, end."""
    problems = []
    for use in (
        lambda: process.thread.call(lambda _: None),
        lambda: process.thread.post(lambda _: None),
    ):
        try:
            use()
            problems.append("no error")
        except Closed as error:
            if str(os.getpid()) not in str(error) or str(os.getppid()) not in str(error):
                problems.append(str(error))
    process.thread.wake()
    process.thread.close(5.0)
    if sys.getswitchinterval() != 0.005:
        problems.append(f"switch interval {sys.getswitchinterval()}")
    os.write(1, f"child {os.getpid()} {problems}\n".encode())  # in one piece: others write, too
    time.sleep(seconds)
    if how == "hard":
        os._exit(0)
    gc.collect()
    sys.exit(0)


def main() -> None:
    process = RealProcess(0, link_timeout_s=60.0, switch_interval_s=0.0005)
    process.connect(1, int(sys.argv[1]))
    print(process.port, flush=True)
    sent = 0
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "send":
            for _ in range(int(arguments[0])):
                process.do(Send(peer=Peer(1), message=part(sent), payload=bytes(100_000), order=(0, 0, sent)))
                sent += 1
        elif command == "fork":
            if os.fork() == 0:
                with contextlib.suppress(KeyboardInterrupt):
                    child_of(process, float(arguments[0]), arguments[1])
        elif command == "wait":
            os.wait()
            print("waited", flush=True)
        elif command == "idle":
            wait_until(process.is_idle)
            link = process.endpoint.links()[Peer(1), True]
            print("idle", link["connections"], link["messages_resent"], process.machine.lost, flush=True)
    process.thread.close(1.0)


if __name__ == "__main__":
    main()

"""Whether a silent peer's machine answers late, as where its heartbeats wait behind data, or at once."""

from __future__ import annotations

import subprocess
import sys

FULL_LINK = """
ip link set lo up mtu 1500
tc qdisc add dev lo root tbf rate 200kbit burst 3000 limit 1000000
exec "$0" -c "$1"
"""
"""Both ways of one connection are the same queue, which holds 40 s of data."""

PROGRAM = """
import socket, threading, time
from netstorm.pslite.tcp_info import answers_late, is_acknowledged

def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]

def read_all(end):
    while end.recv(65536):
        pass

def is_late():
    one.send(b"x")  # the other end reads nothing: only its kernel answers
    time.sleep(0.5)
    assert is_acknowledged(one.fileno(), 60.0)
    return answers_late(one.fileno())

one, other = pair()
print([is_late() for _ in range(3)])
sender, reader = pair()
threading.Thread(target=read_all, args=(reader,), daemon=True).start()
threading.Thread(target=sender.sendall, args=(bytes(10_000_000),), daemon=True).start()
deadline = time.monotonic() + 60
while not is_late():
    assert time.monotonic() < deadline
print("late", answers_late(-1))
"""


def test_a_kernel_answers_late_over_a_full_link_and_at_once_for_a_process_that_reads_nothing() -> None:
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "sh",
        "-ec",
        FULL_LINK,
        sys.executable,
        PROGRAM,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.stdout == "[False, False, False]\nlate False\n", ended.stderr

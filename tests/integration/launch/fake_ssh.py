"""Stands for ssh: runs the command in another session as a remote host would, and only relays.

As with ssh, the words of the command are joined and given to a shell, the environment there is a bare one,
the other side lives on when this process is killed and sees its standard input end, and a host that cannot be
reached, or a command that a signal has killed, gives exit code 255.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

OPTIONS_WITH_VALUE = {"-o", "-p", "-i"}


def main(words: list[str]) -> int:
    while words[0].startswith("-"):
        words = words[2 if words[0] in OPTIONS_WITH_VALUE else 1 :]
    host, *command = words
    if host.rpartition("@")[2] == "unreachable":
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        return 255
    there = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin", "SSH_CONNECTION": host}
    there["PYTHONPATH"] = os.environ["PYTHONPATH"]  # stands for NetStorm being installed there
    remote = subprocess.Popen(
        ["sh", "-c", " ".join(command)], env=there, cwd="/", stdin=subprocess.PIPE, start_new_session=True
    )
    threading.Thread(target=relay, args=(remote,), daemon=True).start()
    code = remote.wait()
    return code if code >= 0 else 255


def relay(remote: subprocess.Popen[bytes]) -> None:
    assert remote.stdin is not None
    try:
        while data := os.read(0, 65536):
            remote.stdin.write(data)
            remote.stdin.flush()
        remote.stdin.close()
    except BrokenPipeError:
        pass


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    os._exit(code)  # the relay may still wait for input

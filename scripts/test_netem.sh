#!/usr/bin/env bash
# Checks the emulation's netem backend on a kernel that has netem, whatever the kernel here has: User-Mode Linux, a Linux
# that runs as an ordinary program, from the package `user-mode-linux` of Debian. It shares this machine's files, makes
# a small network there, measures it against its file before and after a change, and takes it away: about a minute.
#
#   scripts/test_netem.sh        after scripts/test.sh, which makes .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = inside ]; then # as the first process of that Linux
    uml=$2
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t tmpfs tmpfs /run
    mkdir -p /run/etc /dev/shm
    cp -r /etc/. /run/etc 2>/dev/null || true # namespaces have files below /etc: not this machine's
    mount --bind /run/etc /etc
    mount -t tmpfs tmpfs /dev/shm
    export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
    python scripts/load_modules.py "$uml/usr/lib/uml/modules" bridge sch_htb sch_netem tcp_bbr tun veth
    ip link set lo up
    cat >/run/network.yaml <<'YAML'
nodes: {0: {}, 1: {}, 2: {}}
links:
  - {between: [0, 1], rate: 4Mbit, latency: 15ms, loss: 0.1%}
  - {between: [1, 2], rate: 2Mbit, latency: 30ms}
YAML
    wan() { python -m netstorm wan "$@"; }
    measure() { # within 10 %, and at most 25 ms late: that Linux shares a processor with whatever else runs here
        { wan check --name netem --seconds 6 --json || true; } | python -c '
import json, sys
rows = json.load(sys.stdin)["links"]
for row in rows:
    error, late = row["rate_error"], row["round_trip_error"]
    print(row["source"], "to", row["target"], f"rate {error:+.1%}, round trip {late * 1e3:+.2f} ms", row["wrong"])
    if abs(error) > 0.1 or not -0.001 < late < 0.025 or "loss" in row["wrong"]:
        sys.exit("out of tolerance")'
    }
    code=0
    {
        uname -sr
        wan up /run/network.yaml --name netem --backend netem &&
            measure &&
            wan set --name netem --between 0 1 --rate 2Mbit --latency 5ms --loss 0% &&
            wan exec --name netem 0 -- tc qdisc show dev to-r1 &&
            measure &&
            wan status --name netem &&
            wan down --name netem &&
            test -z "$(ip netns list)"
    } || code=$?
    echo "ended with exit code $code"
    echo o >/proc/sysrq-trigger
    sleep 9
fi

uml=$PWD/.cache/user-mode-linux
if [ ! -x "$uml/usr/bin/linux.uml" ]; then
    mkdir -p "$uml"
    (cd "$uml" && apt-get download -qq user-mode-linux && dpkg -x user-mode-linux_*.deb . && rm user-mode-linux_*.deb)
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"$uml/usr/bin/linux.uml" mem=1G root=/dev/root rootfstype=hostfs rootflags=/ rw quiet con=null con0=null,fd:1 \
    init=/bin/bash -- "$PWD/scripts/test_netem.sh" inside "$uml" </dev/null 2>&1 | tee "$output"
grep -q "^ended with exit code 0" "$output"

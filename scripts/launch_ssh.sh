#!/usr/bin/env bash
# Runs a job on several hosts through ssh: the scheduler and one node for each line of a host file.
#
#   scripts/launch_ssh.sh HOSTFILE [OPTION...] -- COMMAND...
#   scripts/launch_ssh.sh cluster.txt --env LR=0.1 -- python train.py --epochs 3
#
# A line of HOSTFILE:   HOST [slots=N] [site=NAME] [rank=R] [address=ADDRESS]   # comment
#
# The scheduler runs on the first host, or --scheduler HOST, at port DMLC_PS_ROOT_PORT (9091). In PyTorch jobs rank 0
# listens at that port + 1000, or at --env MASTER_PORT=PORT. Each host needs
# NetStorm, in the interpreter --python PATH (this one's path), and the folder that this is called from, or --chdir
# DIR. Settings that are set here are passed on. Keys must let ssh in without a question. Output, Ctrl-C, exit
# codes and the other options are those of `netstorm launch`: see `netstorm launch --help`.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/find_netstorm.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
'' | -*) die "no host file: scripts/launch_ssh.sh HOSTFILE [OPTION...] -- COMMAND..." ;;
esac
hosts=$1
shift
exec "${netstorm[@]}" launch --hosts "$hosts" "$@"

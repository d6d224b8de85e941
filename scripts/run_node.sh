#!/usr/bin/env bash
# Runs one node of a job, for those who start each process by hand or from a tool of their own.
#
#   DMLC_PS_ROOT_URI=10.0.0.1 DMLC_NUM_WORKER=4 scripts/run_node.sh python train.py [ARGUMENT...]
#
# DMLC_PS_ROOT_URI    name or address of the scheduler's host
# DMLC_PS_ROOT_PORT   its TCP port (9091)
# DMLC_NUM_WORKER     how many nodes the job has
# NETSTORM_KEY_FILE   the job's key, which `netstorm keys new` makes; needed unless all run on one host
# NETSTORM_RANK       the rank to ask for; any that is free if it is not set. With Slurm: $SLURM_PROCID
# NETSTORM_SITE       the data centre that this node is in
# DMLC_NODE_HOST      name or address at which other nodes reach this one, if they cannot by the one it finds
#
# For PyTorch (init_process_group with env://) a node with a NETSTORM_RANK also gets RANK and WORLD_SIZE, and:
# MASTER_ADDR         name or address of the host of rank 0 (DMLC_PS_ROOT_URI)
# MASTER_PORT         a TCP port that is free there (DMLC_PS_ROOT_PORT + 1000)
# A RANK and WORLD_SIZE that are set already, by torchrun or Slurm's tools, are kept, and NETSTORM_RANK is RANK.
#
# All other settings are variables too: `netstorm env` lists them, docs/reference/settings.md explains them. They are checked
# before the command starts. Signals reach the command itself, and its exit code is this script's.
#
# Old launchers run one command for all roles: with DMLC_ROLE=scheduler this runs the scheduler, and with
# DMLC_ROLE=server it ends at once, because every node aggregates.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$here/find_netstorm.sh"

case "${DMLC_ROLE:-worker}" in
worker) ;;
scheduler) exec "$here/run_scheduler.sh" ;;
server)
    echo "netstorm: DMLC_ROLE=server has nothing to do: every node aggregates; this process ends"
    exit 0
    ;;
*) die "DMLC_ROLE='$DMLC_ROLE': expected worker, scheduler or server" ;;
esac
[ $# -gt 0 ] || die "no command: scripts/run_node.sh python train.py [ARGUMENT...]"
[ "$1" != -- ] || shift
must_be_set DMLC_PS_ROOT_URI "the name or address of the scheduler's host, or 127.0.0.1 if it is this one"
must_be_set DMLC_NUM_WORKER "how many nodes the job has"
export DMLC_ROLE=worker
if [ -z "${NETSTORM_RANK:-}" ] && [ -n "${RANK:-}" ] && [ "${WORLD_SIZE:-}" = "$DMLC_NUM_WORKER" ]; then
    export NETSTORM_RANK=$RANK
elif [ "${NETSTORM_RANK:--1}" != -1 ] && [ -z "${RANK:-}" ]; then
    export RANK=$NETSTORM_RANK WORLD_SIZE=$DMLC_NUM_WORKER
    export MASTER_ADDR=${MASTER_ADDR:-$DMLC_PS_ROOT_URI}
    [ -n "${MASTER_PORT:-}" ] || MASTER_PORT=$((${DMLC_PS_ROOT_PORT:-9091} + 1000))
    export MASTER_PORT
fi
"${netstorm[@]}" env --json >/dev/null
if ! command -v -- "$1" >/dev/null; then
    printf 'netstorm: command %q not found\n' "$1" >&2
    exit 127
fi
exec "$@"

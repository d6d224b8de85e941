#!/usr/bin/env bash
# Runs the scheduler of a job, or with --jobs of several, for those who start each process by hand or from a
# tool of their own.
#
#   DMLC_PS_ROOT_URI=10.0.0.1 DMLC_NUM_WORKER=4 scripts/run_scheduler.sh [OPTION...]
#
# DMLC_PS_ROOT_URI    name or address at which the nodes reach this host; 127.0.0.1 if all run on it
# DMLC_PS_ROOT_PORT   TCP port to listen on (9091)
# DMLC_NUM_WORKER     how many nodes the job has; with --jobs or NETSTORM_JOBS it need not be set
# NETSTORM_KEY_FILE   the job's key, which `netstorm keys new` makes; needed unless all run on one host
#
# All other settings are variables too: `netstorm env` lists them, docs/reference/settings.md explains them. The options
# are those of `netstorm scheduler`. Signals reach the scheduler itself; it ends when all nodes have left.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/find_netstorm.sh"

case " $* " in *" --help "*) exec "${netstorm[@]}" scheduler --help ;; esac
must_be_set DMLC_PS_ROOT_URI "the name or address at which nodes reach this host, or 127.0.0.1 if all run on it"
case "${NETSTORM_JOBS:-1} $* " in "1 "*--jobs*) ;; "1 "*) must_be_set DMLC_NUM_WORKER "how many nodes the job has" ;; esac
export DMLC_ROLE=scheduler
exec "${netstorm[@]}" scheduler "$@"

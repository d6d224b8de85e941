#!/bin/sh
# What the run_*.sh share: GeoMX's layout on one machine, two data centres with two workers each.
#
#   run_fp16.sh -ep 10                  further options are the program's
#   GEOMX=~/GeoMX run_fp16.sh -ep 10    runs GeoMX's own program, unedited, in place of ours
#
# GeoMX starts twelve processes: schedulers, servers and a master worker, too. Here every worker aggregates,
# and one scheduler, which `netstorm launch` starts, has all of them.
#
# Arguments: GeoMX's program, ours, both with options, and further options.
set -eu
here=$(dirname "$0") python=${PYTHON:-python} theirs=$1 ours=$2
shift 2
if [ -n "${GEOMX:-}" ]; then program=$GEOMX/examples/$theirs; else program=$here/$ours; fi
# shellcheck disable=SC2016,SC2086  # each node knows its rank; a program has options
exec "$python" -m netstorm launch -n 4 --site A,A,B,B --topology "${TOPOLOGY:-hierarchical}" -- \
    sh -c 'exec "$0" -m netstorm.run "$@" --cpu --data-slice-idx "$NETSTORM_RANK"' "$python" $program "$@"

#!/bin/sh
# MultiGPS: several servers share keys. Here all nodes do; trees have different roots.
export DMLC_NUM_GLOBAL_SERVER=2 TOPOLOGY=auto
exec "$(dirname "$0")/start.sh" cnn.py hips.py "$@"

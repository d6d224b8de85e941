#!/bin/sh
# Hierarchical frequency aggregation (GeoMX: run_hfa_sync.sh): K1 steps alone, K2 averages of a data centre,
# one of all.
export MXNET_KVSTORE_USE_HFA=1
export MXNET_KVSTORE_HFA_K1="${MXNET_KVSTORE_HFA_K1:-20}" MXNET_KVSTORE_HFA_K2="${MXNET_KVSTORE_HFA_K2:-10}"
exec "$(dirname "$0")/start.sh" cnn_hfa.py hfa.py "$@"

#!/bin/sh
# Differential gradient transmission: small gradients may be late, and go as datagrams between machines.
export ENABLE_DGT=2 DMLC_K=0.8 DMLC_UDP_CHANNEL_NUM=3 ADAPTIVE_K_FLAG=1
exec "$(dirname "$0")/start.sh" cnn.py hips.py "$@"

#!/bin/sh
# Bi-Sparse: of tensors with 1000 elements and more one value in a hundred is sent, both ways.
export MXNET_KVSTORE_SIZE_LOWER_BOUND=1000
exec "$(dirname "$0")/start.sh" cnn_bsc.py "gradient_compression.py --type bsc" "$@"

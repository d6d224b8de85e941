#!/bin/sh
# Mixed-precision quantisation: tensors with 1000 elements and more are sparse, smaller ones float16.
export MXNET_KVSTORE_SIZE_LOWER_BOUND=1000
exec "$(dirname "$0")/start.sh" cnn_mpq.py "gradient_compression.py --type mpq" "$@"

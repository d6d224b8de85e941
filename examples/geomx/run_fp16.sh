#!/bin/sh
# Low-precision quantisation: values travel as float16.
exec "$(dirname "$0")/start.sh" cnn_fp16.py "gradient_compression.py --type fp16" "$@"

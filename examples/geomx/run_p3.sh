#!/bin/sh
# P3: shallow layers go first. Here they always do, in chunks of all keys.
export ENABLE_P3=1
exec "$(dirname "$0")/start.sh" cnn.py hips.py "$@"

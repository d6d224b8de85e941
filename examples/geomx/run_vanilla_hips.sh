#!/bin/sh
# Hierarchical parameter servers: sums within data centres, then across them.
exec "$(dirname "$0")/start.sh" cnn.py hips.py "$@"

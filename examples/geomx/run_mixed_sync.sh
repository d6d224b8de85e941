#!/bin/sh
# MixedSync: no data centre waits for another one. With --dcasgd late gradients are corrected.
export NETSTORM_MIXED_SYNC=1
exec "$(dirname "$0")/start.sh" "cnn.py --mixed-sync" mixed_sync.py "$@"

#!/bin/sh
# TSEngine: trees follow the network. Here they always do; the log says what is in TSEngine's place.
export ENABLE_INTER_TS=1 ENABLE_INTRA_TS=1 MAX_GREED_RATE_TS=0.9 TOPOLOGY=auto
exec "$(dirname "$0")/start.sh" cnn.py hips.py "$@"

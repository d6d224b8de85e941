#!/usr/bin/env bash
# The tests that train for real and run whole benchmarks: minutes, beside scripts/test.sh.
#
#   scripts/test_slow.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv "${EXTRAS:-mxnet,dev}"
exec .venv/bin/pytest -m slow -n 2 --dist loadfile "$@"

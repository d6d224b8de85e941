#!/usr/bin/env bash
# Trains a small CNN on four general nodes of this machine, and compares their weights byte by byte.
#
#   scripts/demo.sh [--epochs N]
#
# The first run makes .venv and installs NetStorm and MXNet there, which takes a minute or two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv examples
PATH="$PWD/.venv/bin:$PATH"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat <<'TEXT'

Four general nodes and a scheduler start on this machine. Each node trains on its quarter of scikit-learn's digits,
adds up its neighbours' gradients and forwards them: there is no server.

TEXT
netstorm launch -n 4 --no-prefix -- python examples/demo.py --folder "$folder" "$@"
cat <<'TEXT'

What to try next, in this folder (. .venv/bin/activate):
  netstorm launch -n 4 -- python examples/gluon_digits.py --epochs 5 --digest
  netstorm launch -n 4 --topology star -- python examples/module_digits.py --optimizer adam
  netstorm launch -n 2 -- python -m netstorm.run YOUR_SCRIPT.py    an unedited script with kvstore='dist_sync'
  netstorm env                                                     every setting, its value and its meaning
TEXT

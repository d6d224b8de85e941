#!/usr/bin/env bash
# All checks and all tests, about in the order of their speed; stops at the first that fails. CI runs exactly this.
#
#   scripts/test.sh [PYTEST ARGUMENT...]        for example: scripts/test.sh tests/unit -k units
#
# EXTRAS=mxnet,torch,bench,dev scripts/test.sh  installs other extras than mxnet,torch,dev
# HYPOTHESIS_PROFILE=nightly scripts/test.sh    more, and each time other, generated examples
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

step() {
    printf '\n== %s\n' "$*"
    "$@"
}

make_venv "${EXTRAS:-mxnet,torch,dev}"
PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile NetStorm anew

# mypy takes longer than the other checks together. It has what they and the tests leave of two cores, and the last word.
mypy >.venv/mypy.txt 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT
step ruff check .
step ruff format --check .
step lint-imports
step python scripts/house.py
# By file, since the tests of a module share what is dear to start; tests/conftest.py says which files begin. Four at
# a time keep two cores busy, since many wait.
step pytest -n 4 --dist loadfile --no-loadscope-reorder "$@"
printf '\n== mypy\n'
wait "$mypy" && code=0 || code=$?
trap - EXIT
cat .venv/mypy.txt
exit "$code"

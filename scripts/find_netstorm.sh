# Sourced by the scripts beside it: the array `netstorm` becomes the netstorm command, the repository's own if it
# has a .venv, and PATH begins with that .venv, so that `python` is the interpreter that has NetStorm.

# die MESSAGE: as `netstorm` itself does when a setting or argument is wrong.
die() {
    printf 'netstorm: %s\n' "$*" >&2
    exit 2
}

# must_be_set VARIABLE MEANING
must_be_set() {
    [ -n "${!1:-}" ] || die "$1 is not set: $2"
}

find_netstorm() {
    local root
    root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
    if [ -x "$root/.venv/bin/netstorm" ]; then
        export PATH="$root/.venv/bin:$PATH"
        netstorm=("$root/.venv/bin/netstorm")
    elif command -v netstorm >/dev/null; then
        netstorm=(netstorm)
    elif python3 -m netstorm --version >/dev/null 2>&1; then
        netstorm=(python3 -m netstorm)
    else
        die "not installed: neither $root/.venv, nor a netstorm command in PATH, nor a python3 that has it." \
            "Install it with: python3 -m venv $root/.venv && $root/.venv/bin/pip install -e '$root[mxnet]'"
    fi
}

find_netstorm

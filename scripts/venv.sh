# Sourced by the scripts beside it, in the repository's root: makes .venv and keeps it up to date.
#
#   make_venv EXTRAS     for example: make_venv mxnet,dev
#
# PYTHON=python3.12 chooses the interpreter of a new .venv.

say() { printf '%s\n' "$*" >&2; }

# install_packages WHY PACKAGE...: Debian packages, if we may; else say what to type.
install_packages() {
    local why=$1
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "$why: installing $*"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    else
        say "$why. Install it, on Debian and Ubuntu with:"
        say "    sudo apt-get install $*"
        return 1
    fi
}

# python_in PYTHON LOWEST HIGHEST: whether PYTHON is there and is 3.LOWEST to 3.HIGHEST.
python_in() {
    "$1" -c "import sys; sys.exit(not (3, $2) <= sys.version_info[:2] <= (3, $3))" 2>/dev/null
}

choose_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        python_in "$PYTHON" 10 99 && echo "$PYTHON" && return
        say "PYTHON=$PYTHON is not Python 3.10 or later"
        return 1
    fi
    for candidate in python3 python3.12 python3.11 python3.10; do # MXNet's last release ends at 3.12
        python_in "$candidate" 10 12 && echo "$candidate" && return
    done
    if python_in python3 13 99; then
        say "note: no Python 3.10 to 3.12 found; $(python3 --version) runs everything but MXNet"
        echo python3
        return
    fi
    say "Python 3.10 or later was not found. Install it, on Debian and Ubuntu with:"
    say "    sudo apt-get install python3 python3-venv"
    return 1
}

# MXNet's wheel brings its own OpenBLAS and Fortran runtime, but not GCC's, which a bare system may lack.
check_mxnet_libraries() {
    local library missing packages=()
    library=$(.venv/bin/python - <<'PY'
import importlib.util, pathlib
found = importlib.util.find_spec("mxnet")
print(pathlib.Path(found.origin).parent / "libmxnet.so" if found and found.origin else "")
PY
)
    [ -n "$library" ] || return 0
    missing=$(ldd "$library" | sed -n 's/^\s*\(\S*\) => not found.*/\1/p' | sort -u)
    case "$missing" in *libgomp*) packages+=(libgomp1) ;; esac
    case "$missing" in *libquadmath*) packages+=(libquadmath0) ;; esac
    case "$missing" in *libstdc++*) packages+=(libstdc++6) ;; esac
    [ ${#packages[@]} = 0 ] || install_packages "MXNet needs $(echo $missing)" "${packages[@]}"
}

make_venv() {
    local extras=$1 python stamp wanted
    if ! .venv/bin/python -c '' 2>/dev/null; then # absent, or of a Python that has gone
        python=$(choose_python) || return
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            install_packages "$python cannot make virtual environments" \
                "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" || return
        fi
        "$python" -m venv --clear .venv || return
    fi
    stamp=.venv/installed-${extras//,/-}
    wanted=$(cat pyproject.toml setup.py scripts/constraints.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "Installing netstorm[$extras] into .venv (minutes, the first time)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt \
            --editable ".[$extras]" || return
        check_mxnet_libraries || return
        echo "$wanted" >"$stamp"
    fi
}

#!/bin/sh
# Usage: make_venv.sh VENV [PYTHON]
#
# Make the virtual environment VENV with PYTHON, or with the first Python >= 3.11 found, and
# install the checkout in it with what constraints.txt pins. Run from the root of the checkout.
set -eu

venv=$1
wanted=${2:-}

fail() {
    echo "error: $*" >&2
    exit 1
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' </dev/null 2>/dev/null || echo "no working Python"; }

find_python() {
    if [ -n "$wanted" ]; then
        is_recent "$wanted" || fail "lightning_mp needs Python 3.11 or newer, but PYTHON=$wanted is $(version_of "$wanted"). Try: make PYTHON=/path/to/python3.11"
        echo "$wanted"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        # a name on the PATH may be a stub that does not run, so each one is asked
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "lightning_mp needs Python 3.11 or newer, but none is on the PATH (python3 is $(version_of python3)). Install one, or try: make PYTHON=/path/to/python3.11"
}

if ! is_recent "$venv/bin/python" || ! "$venv/bin/python" -m pip --version </dev/null >/dev/null 2>&1; then
    python=$(find_python)
    # Debian and Ubuntu ship venv without ensurepip unless asked
    "$python" -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1 || fail "$python cannot make virtual environments: its venv or ensurepip module is missing. Try: apt install python3-venv (or python$(version_of "$python")-venv)"
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --constraint constraints.txt "$@" </dev/null; }

echo "installing into $venv; the first time takes a minute or more"
# torch first: it is the one large download, and nothing that follows may choose another
install setuptools wheel torch
install --no-build-isolation --editable '.[dev]'

#!/bin/sh
# Usage: make_venv.sh VENV [PYTHON [TORCH [LIGHTNING]]]
#
# Make the virtual environment VENV with PYTHON, or with the first Python >= 3.11 found, and
# install the checkout in it with what constraints.txt pins. Run from the root of the checkout.
# TORCH names another release of torch: the build that the package index has for everybody, so
# 2.13.0 does not mean 2.13.0+cpu. LIGHTNING names another release of Lightning, for instance 2.7.0 or
# 2.7.0.dev0. An environment that could not be finished is removed.
set -eu

venv=$1
wanted=${2:-}
torch=${3:-}
lightning=${4:-}
# a CUDA build with all that it brings takes 5 to 6.5 GB, and its archives lie beside it for a while
needed_kib=$((8 * 1024 * 1024))
made=""
pip=""

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

# what else is running, and what is half made, goes with this script
clean_up() {
    [ -z "$pip" ] || kill "$pip" 2>/dev/null || true
    [ -z "$pip" ] || wait "$pip" 2>/dev/null || true
    [ -z "$made" ] || rm -rf "$made"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# In the background, since a shell hears of Ctrl-C only after a command in the foreground has ended.
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --retries 2 --constraint "$pins" "$@" </dev/null >"$venv/pip.log" 2>&1 &
    pip=$!
    wait "$pip" || explain "$venv/pip.log"
    pip=""
    cat "$venv/pip.log"
}

explain() {
    pip=""
    releases=$(sed -n 's/.*requirement torch===.*(from versions: \(.*\)).*/\1/p' "$1" | head -n 1)
    if grep -q 'No space left on device' "$1"; then
        fail "no room is left for $venv on the disk; it takes $(gb "$needed_kib") GB with a CUDA build of torch, and $(gb "$(free_kib)") GB are free"
    elif grep -qE 'Max retries exceeded|NewConnectionError|NameResolutionError|Failed to establish|name resolution|ConnectTimeout|ReadTimeout|Network is unreachable|Connection (refused|reset|broken)|Cannot connect to proxy' "$1" && [ "${releases:-none}" = none ]; then
        fail "the package index does not answer, so $venv was not made. Is there a network?"
    elif [ -n "$releases" ] && [ "$releases" != none ]; then
        fail "there is no torch $torch for $("$venv/bin/python" --version) here. The newest are: $(newest "$releases")"
    elif [ -n "$torch" ] && grep -q "Cannot install torch===$torch " "$1"; then
        fail "pip's own settings allow no torch $torch here; see: python -m pip config list"
    fi
    cat "$1" >&2
    fail "pip could not install into $venv; see above"
}

newest() { echo "$1" | tr -d ' ' | tr , '\n' | tail -n 8 | tr '\n' ' ' | sed 's/ $//'; }

free_kib() { df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print $4 }'; }

unpin() {
    grep -vE "^($1)==" "$pins" >"$pins.new"
    mv "$pins.new" "$pins"
}

gb() { awk -v kib="$1" 'BEGIN { printf "%.1f", kib * 1024 / 1e9 }'; }

if [ -n "$torch" ]; then
    echo "$torch" | grep -qxE '[0-9]+\.[0-9]+\.[0-9]+' || fail "TORCH=$torch is no release of torch. Give all three numbers, for instance: make test TORCH=2.13.0"
    oldest=$(sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
    [ "$(printf '%s\n%s.0\n' "$torch" "$oldest" | sort -t. -k1,1n -k2,2n -k3,3n | head -n 1)" = "$oldest.0" ] || fail "lightning_mp needs torch $oldest or newer, but TORCH=$torch"
    free=$(free_kib)
    [ -e "$venv" ] || [ "$free" -ge "$needed_kib" ] || fail "$venv takes $(gb "$needed_kib") GB with a CUDA build of torch, but only $(gb "$free") GB are free on the disk. Make room, or take the build at hand: make test"
fi

if ! is_recent "$venv/bin/python" || ! "$venv/bin/python" -m pip --version </dev/null >/dev/null 2>&1; then
    python=$(find_python)
    # Debian and Ubuntu ship venv without ensurepip unless asked
    "$python" -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1 || fail "$python cannot make virtual environments: its venv or ensurepip module is missing. Try: apt install python3-venv (or python$(version_of "$python")-venv)"
    echo "making $venv with $("$python" --version)"
    made=$venv
    "$python" -m venv --clear "$venv"
fi

echo "installing into $venv; the first time takes a minute or more"
pins=$venv/constraints.txt
setuptools=setuptools
cp constraints.txt "$pins"
if [ -n "$torch" ]; then
    # each release of torch has its own idea of setuptools, and ours is how pyproject.toml is read
    setuptools='setuptools>=77'
    unpin 'torch|setuptools'
fi
if [ -n "$lightning" ]; then
    unpin 'lightning|pytorch-lightning|lightning-utilities'
    echo "lightning===$lightning" >>"$pins"
fi
# torch first: it is the one large download, and nothing that follows may choose another
install "$setuptools" wheel "torch${torch:+===$torch}"
# only now: asked for and pinned at once, pip calls a release that there is not a conflict
[ -z "$torch" ] || echo "torch===$torch" >>"$pins"
install --no-build-isolation --editable '.[dev]'
made=""

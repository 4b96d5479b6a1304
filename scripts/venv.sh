#!/usr/bin/env bash
# Makes or updates the virtual environment in .venv: scripts/venv.sh [EXTRAS], e.g. scripts/venv.sh dev
#
# Installs this checkout (editable) with the given extras and the releases of constraints.txt. Does nothing when that
# has been done already; starts over when the environment is half made, broken, or was made for another folder.
#   PYTHON   interpreter to make it with; default: the first of python3.11, python3 ... that is new enough
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
extras=${1:-}
package=.${extras:+[$extras]}
unfinished=$venv/megacp-unfinished
folder=$venv/megacp-folder
stamp=$venv/megacp-installed-${extras:-core}
wanted=$(cat pyproject.toml constraints.txt | cksum)

find_python() {
    local python
    for python in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14 python}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "venv.sh: need Python >= 3.11 with the modules venv and ensurepip; ${PYTHON:-python3.11, python3 ...}:" \
        "none such. Install one, or name one in PYTHON" >&2
    return 1
}

runs() { "$venv/bin/python" -c "$1" 2>/dev/null; }

is_whole() {
    [[ ! -e $unfinished ]] || return 1
    # Console scripts and the editable link hold the absolute path: a moved or copied checkout needs a new one.
    [[ ! -e $folder || $(<"$folder") == "$PWD" ]] || return 1
    runs 'import pip, sys; sys.exit(sys.version_info < (3, 11))'
}

if is_whole; then
    if [[ -e $stamp && $(<"$stamp") == "$wanted" ]]; then
        exit 0
    fi
else
    if runs '' && [[ ! -e $unfinished && ! -e $folder ]]; then
        echo "venv.sh: $PWD/$venv is not ours and lacks pip or Python >= 3.11: move it away and run again" >&2
        exit 1
    fi
    python=$(find_python)
    echo "making $venv with $("$python" -V)"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$unfinished"
    "$python" -m venv "$venv"
fi
echo "installing $package into $venv (minutes, the first time)"
touch "$unfinished"
"$venv/bin/python" -m pip install --disable-pip-version-check -qq -c constraints.txt -e "$package"
echo "$PWD" >"$folder"
echo "$wanted" >"$stamp"
rm "$unfinished"

#!/usr/bin/env bash
# Checks on one GPU what only a GPU can show: exactness, every exchange, training, memory, speed (tools/check_gpu.py).
#
#   scripts/check_gpu.sh WHEELS_DIR [option ...] [part ...]
#   scripts/check_gpu.sh wheels --out results            all parts; the table is also in results/check_gpu.json
#   scripts/check_gpu.sh wheels kernels comm             some of them; --help names them all
#
# Takes less than 8 minutes and needs a Python >= 3.11 with PyTorch, but no network: packages that it lacks are taken
# from the wheels in WHEELS_DIR, into a folder that is gone at the end. What is installed stays as it is. To fill
# WHEELS_DIR, where there is a network, for Python 3.12 on the GPU's machine:
#
#   pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels pydantic
#
# and likewise numpy, pyyaml or safetensors, if they are missing there. Exit code 1: a check failed; 2: could not begin.
#   PYTHON   interpreter that has PyTorch; default: python3
set -euo pipefail

die() {
    echo "check_gpu.sh: $*" >&2
    exit 2
}

if (($# == 0)) || [[ $1 == -* ]]; then
    die "usage: scripts/check_gpu.sh WHEELS_DIR [option ...] [part ...]; WHEELS_DIR may be an empty folder"
fi
wheels=$1
shift
[[ -d $wheels ]] || die "$wheels is not a folder; fill it as the head of this script says"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is not a Python of 3.11 or newer"
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    die "$python has no PyTorch: name one that has in PYTHON"

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
missing=$("$python" -c '
from importlib.metadata import PackageNotFoundError, version
for package, least in {"numpy": (1, 26), "pyyaml": (6, 0), "pydantic": (2, 10), "safetensors": (0, 5)}.items():
    try:
        if tuple(map(int, version(package).split(".")[:2])) >= least:
            continue
    except PackageNotFoundError:
        pass
    print(package)
')
if [[ -n $missing ]]; then
    mapfile -t packages <<<"$missing"
    echo "from $wheels: ${packages[*]}"
    "$python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --find-links "$wheels" \
        --no-compile --no-cache-dir --target "$site" "${packages[@]}" ||
        die "$wheels lacks wheels for ${packages[*]} or what they need: fill it as the head of this script says"
fi

# Ranks on one machine need no other interface, and its host name may lead nowhere.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH} "$python" -P -m tools.check_gpu "$@"

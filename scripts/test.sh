#!/usr/bin/env bash
# Every check of the project: ruff, pyright, pytest. Arguments go to pytest: scripts/test.sh tests/test_grid.py -k order
#
# Needs Python >= 3.11 and a C compiler, nothing else: it keeps an environment of its own in .venv (scripts/venv.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One thread a process: the suite runs several ranks on few cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# A launcher's variables would make tests believe they are ranks of a job.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT || true

failed=()
check() {
    local name=$1
    shift
    printf '\n==== %s\n' "$name"
    "$@" || failed+=("$name")
}

printf '==== environment\n'
bash scripts/venv.sh dev
bin=.venv/bin
"$bin/python" -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")'

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "pyright" "$bin/pyright" --pythonpath "$bin/python"
check "pytest" "$bin/python" -m pytest "$@"

if ((${#failed[@]})); then
    printf '\nFAILED:'
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '\nall checks passed\n'

#!/usr/bin/env bash
# From nothing to a trained model in a few minutes on a CPU: context parallelism over two processes, on real text.
#
#   scripts/quickstart.sh
#
# Needs Python >= 3.11 and a C compiler, nothing else. The text is the source of Python's own standard library.
# Steps that are done are not done again; an interrupted training goes on from its last checkpoint.
#   QUICKSTART_ITERS   train so many iterations, in a run of its own (runs/quickstart-N), to try the script itself
set -euo pipefail
if ! [[ ${QUICKSTART_ITERS:-2} =~ ^([2-9]|[1-9][0-9]{1,8})$ ]] || (($# > 0)); then
    echo "usage: [QUICKSTART_ITERS=N] scripts/quickstart.sh, with a whole N of 2 or more and no arguments" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=data/quickstart
run=runs/quickstart${QUICKSTART_ITERS:+-$QUICKSTART_ITERS}
config=configs/quickstart.yaml

step=start
begin() {
    step=$1
    printf '\n==== %s\n' "$step"
}
report_failure() {
    local status=$?
    ((status == 0)) && return
    printf '\nquickstart.sh: the step "%s" failed with status %d (see above).\n' "$step" "$status" >&2
    printf 'Run it again to go on from there, or remove %s and %s first to start over.\n' "$data" "$run" >&2
}
trap report_failure EXIT

begin "environment"
bash scripts/venv.sh plot
PATH=$PWD/.venv/bin:$PATH

# torchrun sets this, with a warning, where it is not set; the trainer chooses its threads itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

in_config() { python -c "import sys, yaml; print(yaml.safe_load(open('$config'))[sys.argv[1]][sys.argv[2]])" "$@"; }
iterations=${QUICKSTART_ITERS:-$(in_config train train_iters)}
# The first part ends here, saves and exits; the second resumes.
pause=$((iterations - (iterations + 3) / 4))
settings=("logging.run_dir=$run" "checkpoint.save=$run/checkpoints" "train.train_iters=$iterations")
if [[ -n ${QUICKSTART_ITERS:-} ]]; then settings+=(optimizer.lr_warmup_iters=1); fi

saved_iteration() {
    local name=iter_0
    if [[ -r $run/checkpoints/latest ]]; then name=$(<"$run/checkpoints/latest"); fi
    echo $((10#${name#iter_}))
}
train() { torchrun --standalone --nproc-per-node 2 pretrain_gpt.py "$config" "${settings[@]}" "$@"; }

# Tests and the code of other packages are left out.
source_text=(--input "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" --suffix .py --skip-bad
    --exclude test tests idlelib lib2to3 site-packages dist-packages __pycache__)

begin "tokenizer: $data/tokenizer.model"
if [[ -e $data/tokenizer.model ]]; then
    echo "done before"
else
    python tools/train_tokenizer.py "${source_text[@]}" --vocab-size "$(in_config model vocab_size)" \
        --output-prefix "$data/tokenizer"
fi

begin "token files: $data/stdlib_text_document.bin and .idx"
if [[ -e $data/stdlib_text_document.idx && -e $data/stdlib_text_document.bin ]]; then
    echo "done before"
else
    python tools/preprocess_data.py "${source_text[@]}" --output-prefix "$data/stdlib" --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model"
fi
python tools/inspect_data.py "$data/stdlib_text_document"

begin "training, iterations 1 to $pause"
if (($(saved_iteration) < pause)); then
    train "train.exit_interval=$pause"
else
    echo "done before: $run/checkpoints holds iteration $(saved_iteration)"
fi

begin "resuming from iteration $(saved_iteration), up to $iterations"
if (($(saved_iteration) < iterations)); then
    train
else
    echo "done before; remove $run to train again"
fi

begin "generation: what the model makes of 'def '"
python tools/generate.py "$run/checkpoints" --prompt 'def ' | tee "$run/generated.txt"

begin "plot of the loss"
python tools/plot_loss.py "$run" --out "$run/loss.png"

begin "done"
cat <<END
tokenizer     $PWD/$data/tokenizer.model
token files   $PWD/$data/stdlib_text_document.{bin,idx}
checkpoints   $PWD/$run/checkpoints
loss          $PWD/$run/loss.png, metrics.jsonl; tensorboard --logdir $run
generated     $PWD/$run/generated.txt
END

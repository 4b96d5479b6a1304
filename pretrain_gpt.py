"""Entry of torchrun: `torchrun --nproc-per-node N pretrain_gpt.py configs/NAME.yaml [part.key=value ...]`."""

from __future__ import annotations

import sys

from megacp.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

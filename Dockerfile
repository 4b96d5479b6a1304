# megacp for GPU clusters:  docker build -t megacp .  &&  docker run --gpus all --ipc=host -it megacp
#
# NVIDIA's image brings PyTorch, NCCL and TransformerEngine built for each other; nothing below may replace them.
# Any newer release will do: --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

# Everything that the image has keeps its release: pip may add packages, not change one.
RUN pip list --format=freeze > /etc/megacp-image.txt

# Before the sources, so that an edit of them does not install this again.
RUN pip install --no-cache-dir -c /etc/megacp-image.txt \
    "pydantic>=2.10" "pyyaml>=6.0" "sentencepiece>=0.2" "safetensors>=0.5" "tensorboard>=2.18" "rich>=13" \
    "transformers>=5.0" "tokenizers>=0.22" "wandb>=0.20" "zstandard>=0.23"

WORKDIR /opt/megacp
COPY . .
# --no-deps: the image's torch is a pre-release build, which the range in pyproject.toml would not accept.
RUN pip install --no-cache-dir --no-deps -e . \
    && python -c "import torch, pydantic, sentencepiece, safetensors, megacp.grid; print(torch.__version__)"

# docker build -t sparseforge .                              for NVIDIA GPUs
# docker build -t sparseforge --build-arg DEVICE=cpu .       for CPUs
# docker run --gpus all --ipc host -v "$PWD/runs:/runs" sparseforge train --deepspeed zero3 --output_dir /runs/demo
ARG DEVICE=cuda

# The compiler stays: torch.compile and DeepSpeed make kernels while a run starts.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS system-cuda
ENV SPARSEFORGE_TORCH_INDEX=https://download.pytorch.org/whl/cu130

FROM ubuntu:24.04 AS system-cpu
ENV SPARSEFORGE_TORCH_INDEX=https://download.pytorch.org/whl/cpu

# What a checkout needs, without packages of Python: the devcontainer ends here.
# hadolint ignore=DL3006
FROM system-${DEVICE} AS system
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git libaio-dev openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM system AS package
ENV VIRTUAL_ENV=/opt/sparseforge PATH=/opt/sparseforge/bin:$PATH
RUN python3 -m venv "$VIRTUAL_ENV"
WORKDIR /opt/source
# torch by itself: a change of the code does not download it again.
COPY constraints.txt .
RUN pip install --no-cache-dir --index-url "$SPARSEFORGE_TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY sparseforge_ds sparseforge_ds
COPY ds_configs ds_configs
RUN pip install --no-cache-dir -c constraints.txt '.[zero_shot,peft]'

WORKDIR /workspace
ENTRYPOINT ["sparseforge"]
CMD ["--help"]

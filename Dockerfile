# An image with the package, its tools and `megatron-flex`.
#
#   docker build -t megatron-flex .                                            for CPUs
#   docker build -t megatron-flex:cuda \
#       --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg CUDAARCHS="80;90" .
#
# Not built where it was written, which has no Docker engine. See docs/installing.md.
ARG BASE=debian:12-slim

FROM ${BASE} AS build
ARG CUDAARCHS=
ENV DEBIAN_FRONTEND=noninteractive CUDAARCHS=${CUDAARCHS}
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make python3 python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/megatron-flex
ENV PATH=/opt/megatron-flex/bin:$PATH
COPY constraints.txt /build/constraints.txt
# PyTorch's wheels for CPUs have an index of their own; the default one has those for CUDA.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c /build/constraints.txt torch \
    && pip install --no-cache-dir -c /build/constraints.txt setuptools
COPY . /build
RUN CUDAARCHS=${CUDAARCHS:-} pip install --no-cache-dir --no-build-isolation -c /build/constraints.txt /build

FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/megatron-flex /opt/megatron-flex
ENV PATH=/opt/megatron-flex/bin:$PATH
WORKDIR /work
ENTRYPOINT ["megatron-flex"]
CMD ["--help"]

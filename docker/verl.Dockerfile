# The plugin on verl's own image: CUDA 13.0, torch 2.11.0, vLLM 0.24.0, transformers 5.5.3, flash-attn.
# Written from that image's published contents; not built or run here. From the root of the clone:
#   docker build -f docker/verl.Dockerfile -t jetrl-verl .
# Models, data and results are mounted; the container keeps nothing else:
#   docker run --rm -it --gpus all --shm-size=10g -v ~/models:/root/models -v ~/data:/root/data \
#     -v "$PWD/outputs:/opt/jetrl_patch/outputs" -w /opt/jetrl_patch jetrl-verl
ARG BASE=verlai/verl:vllm024.dev2
FROM ${BASE}

# The image holds verl's dependencies, but not verl. Its default trainer imports TransferQueue.
ARG VERL=0.9.1
RUN pip install --no-cache-dir --no-deps "verl==${VERL}" "TransferQueue>=0.1.10"

COPY . /opt/jetrl_patch
RUN pip install --no-cache-dir -e /opt/jetrl_patch

# fails here, not in a run, if the image holds a version that is not supported
RUN jetrl doctor --status
CMD ["bash"]

# The plugin on the image that OpenRLHF's own dockerfile/Dockerfile builds: NVIDIA's PyTorch image, vLLM 0.27.1, flash-attn.
# Written from that file; not built or run here. From the root of the clone, with OpenRLHF's clone beside it:
#   docker build -t openrlhf ../OpenRLHF/dockerfile
#   docker build -f docker/openrlhf.Dockerfile -t jetrl-openrlhf .
# Models, data and results are mounted; the container keeps nothing else:
#   docker run --rm -it --gpus all --shm-size=10g -v ~/models:/root/models -v ~/data:/root/data \
#     -v "$PWD/outputs:/opt/jetrl_patch/outputs" -w /opt/jetrl_patch jetrl-openrlhf
ARG BASE=openrlhf
FROM ${BASE}

# The image holds vLLM, but not OpenRLHF. vLLM stays as it is; builds see the torch that is installed.
ARG OPENRLHF=0.11.2
RUN pip install --no-cache-dir --no-build-isolation "openrlhf==${OPENRLHF}"

COPY . /opt/jetrl_patch
RUN pip install --no-cache-dir -e /opt/jetrl_patch

# fails here, not in a run, if the image holds a version that is not supported
RUN jetrl doctor --status
CMD ["bash"]

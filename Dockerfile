# The README's first command:
#
#     docker build -t torchbeast .
#     docker run --rm -it --shm-size 1g -v torchbeast-logs:/logs torchbeast
#
# What stands after the image's name is another command, as after `python -m`:
#
#     docker run --rm -v torchbeast-logs:/logs torchbeast \
#         polybeast --env PongNoFrameskip-v4 --savedir /logs
#
# It has PyTorch's standard build, with CUDA (--gpus all). Hosts of environments need no
# PyTorch: examples/kubernetes takes this image and a smaller one,
#
#     docker build --target environments -t torchbeast-environments .
#
# What other environments than Atari's need, add to the first stage.
FROM python:3.11-slim-bookworm AS base
# tini: without it, a signal during Python's start would be lost, which the first process
# of a container does not get before it handles it.
RUN apt-get update && apt-get install -y --no-install-recommends tini && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home beast && install -d -o beast /logs
WORKDIR /opt/torchbeast
COPY requirements.txt .
RUN grep -E '^(numpy|gymnasium|grpcio|protobuf|ale-py|opencv)' requirements.txt > environments.txt && \
    pip install --no-cache-dir -r environments.txt
ENTRYPOINT ["tini", "--", "python", "-m"]

FROM base AS environments
COPY *.py ./
COPY torchbeast torchbeast
COPY examples examples
RUN chmod -R a+rX .
USER 1000
CMD ["polybeast_env", "--help"]

FROM base AS torchbeast
RUN apt-get update && apt-get install -y --no-install-recommends \
    g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler && \
    rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -r requirements.txt
COPY pyproject.toml README.md LICENSE *.py ./
COPY torchbeast torchbeast
COPY examples examples
COPY csrc csrc
RUN pip install --no-cache-dir --no-deps --editable . && \
    python -c "import libtorchbeast" && chmod -R a+rX .
USER 1000
CMD ["monobeast", "--env", "PongNoFrameskip-v4", "--savedir", "/logs"]

# `msattn serve` without root, on a CPU or on NVIDIA GPUs (docs/serving.md, Containers):
#   docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of builds for CPUs> --tag msattn:cpu .
#   docker build --target cuda --tag msattn:cuda .
# Without that index a torch for CUDA is installed, which CPUs run too, but it takes several GB.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt __init__.py __main__.py cli.py ./
COPY conf conf
COPY kernels kernels
COPY trainer trainer
RUN python -m venv /opt/msattn
RUN /opt/msattn/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[gguf,grammar,serve]'

FROM python:3.11-slim AS base
RUN useradd --create-home --uid 1000 msattn && install --directory --owner msattn /home/msattn/.cache
COPY --from=build /opt/msattn /opt/msattn
ENV PATH=/opt/msattn/bin:$PATH
# Artifacts are read from outputs/ here, models of the Hub are kept in .cache/: mount what should outlive the container.
WORKDIR /home/msattn
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s \
  CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["msattn", "serve", "--host", "0.0.0.0", "--port", "8000"]

# Triton compiles a launcher for each kernel, with a C compiler. The driver is the host's (NVIDIA Container Toolkit).
FROM base AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER msattn

FROM base AS cpu
USER msattn

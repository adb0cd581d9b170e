# A server of a trained model: tools/serve.py. Not built here: there was no Docker where this was written. hadolint
# finds nothing in it.
#
#     docker build -t paddle-vit-serve .
#     docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/checkpoints/best:/model:ro paddle-vit-serve
#
# For a GPU (not run on a GPU), BASE is a Debian or Ubuntu with Python 3.10 to 3.13 and the CUDA and cuDNN of its Paddle:
#
#     docker build -t paddle-vit-serve --build-arg BASE=... --build-arg PADDLE=paddlepaddle-gpu==2.6.2 .
#     docker run --gpus all ...

ARG BASE=python:3.11-slim
FROM ${BASE} AS build
# g++ compiles the operators that make CPUs fast (ops/).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ARG PADDLE=
WORKDIR /app
COPY . .
# Where the compiled operators are; the server reads them there.
ENV XDG_CACHE_HOME=/app/.cache
RUN make ops PADDLE="$PADDLE" \
    && .venv/bin/python -m pip install --no-cache-dir -c .venv/constraints.txt -e ".[serve]" \
    && .venv/bin/python -m compileall -q . \
    && rm -rf /root/.cache .cache/pip

FROM ${BASE}
# libgomp1: Paddle's threads.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /tmp --shell /usr/sbin/nologin serve
COPY --from=build /app /app
WORKDIR /app
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp XDG_CACHE_HOME=/app/.cache
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD [".venv/bin/python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# SIGTERM lets the server answer what it took; then it ends.
STOPSIGNAL SIGTERM
ENTRYPOINT [".venv/bin/python", "tools/serve.py"]
CMD ["/model", "-host=0.0.0.0"]

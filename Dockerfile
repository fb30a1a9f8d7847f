# Three images from one file: `executor` (the default target; torch), `scheduler` (the reference scheduler; the client
# alone, no torch) and `worker` (the router for OpenAI clients and its worker, no torch). docker-compose.yml runs them.
#
#   BASE_IMAGE       any image with Python 3.11 and its venv module. On a GPU it needs what BUILD_IMAGE has: Triton
#                    compiles when it runs (docker-compose.gpu.yml)
#   BUILD_IMAGE      one with the same Python, its headers and a C compiler, for the CPU's kernels; without a compiler the
#                    images work, several times slower, and `exact_span_tokens` is 0 (docs/fleet.md, "FleetClient")
#   build/wheels/    where `make wheels` has made this folder, packages come from it and no index is asked: so an image
#                    gets torch's build for CPUs, from wherever pip is configured to find it
#
# The images to build from can be named by digest, NAME:TAG@sha256:..., which a registry reports of a pull; a tag may be
# moved.
# Packages are taken by the hashes in locked/ (`make lock`), or in build/wheels/.
#
# No `# syntax=` line and nothing that only BuildKit knows: it builds on an engine without either.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BUILD_IMAGE=python:3.11-bookworm

FROM ${BASE_IMAGE} AS base
RUN groupadd --gid 10001 ferrum \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ferrum
# The root filesystem is read-only where these images run: nothing may want to write outside /tmp.
ENV PATH=/app/bin:/opt/venv/bin:$PATH PYTHONPATH=/app HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app

FROM ${BUILD_IMAGE} AS build
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY locked build/wheel[s] ./
RUN python3 -m venv /opt/venv \
    && if ls ./*.whl >/dev/null 2>&1; then printf '[global]\nno-index = true\nfind-links = /src\n' >/opt/venv/pip.conf; fi

FROM build AS executor-packages
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r executor.txt \
    && pip uninstall --yes pip && rm -f /opt/venv/pip.conf

FROM build AS scheduler-packages
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r scheduler.txt \
    && pip uninstall --yes pip && rm -f /opt/venv/pip.conf

FROM build AS worker-packages
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r worker.txt \
    && pip uninstall --yes pip && rm -f /opt/venv/pip.conf

# Our code lies beside the packages, in a layer of its own: a new version does not ship torch again.
FROM build AS code
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r build.txt
WORKDIR /src/ferrum-rpc
COPY pyproject.toml README.md LICENSE ./
COPY ferrum_rpc ferrum_rpc/
COPY ferrum_rpc_kernels ferrum_rpc_kernels/
COPY ferrum_rpc_demo ferrum_rpc_demo/
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation --target /app . \
    && pip install --no-cache-dir --no-index --no-deps --no-build-isolation --target /server ./ferrum_rpc_kernels ./ferrum_rpc_demo
COPY clients /clients/clients
# Files keep the modes of the checkout they come from; the user who runs them is not the one who owns them.
RUN chmod -R a+rX,go-w /app /server /clients

FROM base AS scheduler
COPY --from=scheduler-packages /opt/venv /opt/venv
COPY --from=code /app /app
COPY --from=code /clients /app
USER 10001:10001
ENTRYPOINT ["python", "-m", "clients.scheduler"]
CMD ["--help"]

FROM base AS worker
COPY --from=worker-packages /opt/venv /opt/venv
COPY --from=code /app /app
USER 10001:10001
EXPOSE 50061
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["ferrum-rpc", "health", "--target", "127.0.0.1:50061", "--timeout", "3"]
ENTRYPOINT ["ferrum-rpc"]
CMD ["worker", "smg", "--host", "0.0.0.0", "--insecure"]

FROM base AS executor
# An empty volume takes owner and mode from this folder: compiled kernels (docker-compose.gpu.yml).
RUN install -d -o 10001 -g 10001 -m 0700 /cache
COPY --from=executor-packages /opt/venv /opt/venv
# COMPILES=yes: end the build if the base image cannot compile what Triton compiles at run time.
ARG COMPILES=no
RUN if [ "$COMPILES" = yes ]; then \
      include="$(python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" \
      && gcc -shared -fPIC "-I$include" -include Python.h -x c -o /tmp/probe.so /dev/null && rm /tmp/probe.so; \
    fi
COPY --from=code /app /app
COPY --from=code /server /app
ENV FERRUM_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["ferrum-rpc", "health", "--target", "127.0.0.1:50051", "--timeout", "3"]
ENTRYPOINT ["ferrum-rpc"]
# --insecure: the container's network decides who reaches it. FERRUM_TLS_* and FERRUM_TOKENS are asked for all the same.
CMD ["serve", "demo", "--host", "0.0.0.0", "--insecure", "--port", "50051"]

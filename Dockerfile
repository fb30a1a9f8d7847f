# Two images from one file: `executor` (the default target; torch) and `scheduler` (the reference scheduler; the client
# alone, no torch). `docker compose build` makes both; docker-compose.yml runs them.
#
#   BASE_IMAGE            any image with Python 3.11 and its venv module
#   BUILD_IMAGE           one with the same Python and a C compiler, for the attention kernel; without a compiler the
#                         images work all the same, and slower
#   PIP_EXTRA_INDEX_URL   a further package index, e.g. one with CPU-only torch wheels (the default ones carry CUDA)
#   build/wheels/         where this folder exists, packages come from it and no index is asked
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

# What each image needs, as lists of their own: an edit of pyproject.toml that leaves them alone installs nothing again.
FROM base AS requirements
WORKDIR /src
COPY pyproject.toml ./
RUN python3 -c "import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
[pathlib.Path(f'{extra}.txt').write_text('\n'.join(project['dependencies'] + project['optional-dependencies'][extra])) \
for extra in ('server', 'uvloop', 'scheduler')]"

FROM ${BUILD_IMAGE} AS build
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt build/wheel[s] /wheels/
RUN python3 -m venv /opt/venv \
    && if ls /wheels/*.whl >/dev/null 2>&1; then \
        printf '[global]\nno-index = true\nfind-links = /wheels\n' >/opt/venv/pip.conf; fi
COPY constraints.txt ./
ARG PIP_EXTRA_INDEX_URL=
# The build backend comes in its pinned version too: older pips read the first of these for it, newer ones the second.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt

FROM build AS executor-packages
COPY --from=requirements /src/server.txt /src/uvloop.txt ./
RUN pip install --no-cache-dir -c constraints.txt -r server.txt -r uvloop.txt \
    && pip uninstall --yes pip && rm -f /opt/venv/pip.conf

FROM build AS scheduler-packages
COPY --from=requirements /src/scheduler.txt ./
RUN pip install --no-cache-dir -c constraints.txt -r scheduler.txt \
    && pip uninstall --yes pip && rm -f /opt/venv/pip.conf

# Our code lies beside the packages, in a layer of its own: a new version does not ship torch again.
FROM build AS code
COPY pyproject.toml README.md LICENSE ./
COPY ferrum_rpc ferrum_rpc/
RUN pip install --no-cache-dir --no-deps --target /app .
COPY clients /clients/clients
# Files keep the modes of the checkout they come from; the user who runs them is not the one who owns them.
RUN chmod -R a+rX,go-w /app /clients

FROM base AS scheduler
COPY --from=scheduler-packages /opt/venv /opt/venv
COPY --from=code /app /app
COPY --from=code /clients /app
USER 10001:10001
ENTRYPOINT ["python", "-m", "clients.scheduler"]
CMD ["--help"]

FROM base AS executor
COPY --from=executor-packages /opt/venv /opt/venv
COPY --from=code /app /app
ENV FERRUM_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["ferrum-rpc", "health", "--target", "127.0.0.1:50051", "--timeout", "3"]
ENTRYPOINT ["ferrum-rpc"]
# --insecure: the container's network decides who reaches it. FERRUM_TLS_* and FERRUM_TOKENS are asked for all the same.
CMD ["serve", "demo", "--host", "0.0.0.0", "--insecure", "--port", "50051"]

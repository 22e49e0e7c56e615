"""`python -m worker_svc.health`: exit code 0 when the worker that these settings describe answers.

A worker listens when its model and kernels are loaded. Loads neither itself.
"""

import sys
from typing import Any

import grpc

from protos.probe import probe
from protos.settings import read_settings
from protos.worker_pb2 import HealthRequest
from protos.worker_pb2_grpc import WorkerStub
from worker_svc.settings import WorkerSettings


def ask(channel: grpc.Channel, **options: Any) -> object:
    """Ask who answers."""
    return WorkerStub(channel).Health(HealthRequest(), **options)


if __name__ == "__main__":
    settings = read_settings(WorkerSettings, [])
    sys.exit(probe(settings.host, settings.worker_port, settings, ask))

"""`python -m scheduler_svc.health`: exit code 0 when the scheduler that these settings describe answers."""

import sys
from typing import Any

import grpc

from protos.probe import probe
from protos.scheduler_pb2 import GetStatsRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from protos.settings import read_settings
from scheduler_svc.settings import SchedulerSettings


def ask(channel: grpc.Channel, **options: Any) -> object:
    """Ask for the cell's figures."""
    return SchedulerStub(channel).GetStats(GetStatsRequest(), **options)


if __name__ == "__main__":
    settings = read_settings(SchedulerSettings, [])
    sys.exit(probe(settings.host, settings.scheduler_port, settings, ask))

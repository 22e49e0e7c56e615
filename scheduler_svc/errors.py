"""What the shell refuses a peer with, and the gRPC status that it becomes.

A request that cannot be served is no such error: it ends with a terminal run in its session
(core.types.SchedulerError).
"""

import grpc

from protos.channel import Refusal, StatusError


class ServiceError(StatusError):
    """A call is refused or ended; the message tells the peer why."""


class RegistrationRefusedError(ServiceError):
    """A worker does not fit this cell, or is not who it says it is."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    refusal = Refusal.UNFIT_REGISTER


class StaleRegistrationError(RegistrationRefusedError):
    """A Register is replayed or overtaken: its worker has registered with this lane epoch, or a newer one, before."""

    refusal = Refusal.REPLAYED_REGISTER


class WorkerUnreachableError(ServiceError):
    """A worker that registers does not answer at its address; it may try again."""

    status = grpc.StatusCode.UNAVAILABLE


class SessionRefusedError(ServiceError):
    """A session does not open as the protocol asks."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class StaleSessionError(SessionRefusedError):
    """A session is replayed or overtaken: its gateway has opened one with this number, or a newer one, before."""

    refusal = Refusal.REPLAYED_SESSION


class SessionBrokenError(ServiceError):
    """A session is ended because its gateway is silent, does not read, or has opened a newer one."""

    status = grpc.StatusCode.ABORTED


class ShuttingDownError(ServiceError):
    """A session is ended because the scheduler stops."""

    status = grpc.StatusCode.UNAVAILABLE

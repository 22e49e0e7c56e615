"""The worker's exceptions.

WorkerError
├── StartupError            the process cannot start; the message is one line for the person who started it
│   └── OutOfMemoryAtStartError
├── WrongInstanceError      the caller means another process
├── FencedError             the caller is not, or no longer, the scheduler that this worker obeys
│   └── EpochEndedError     that came to be while a step was waiting
├── StepGapError            a step is neither the next one nor one whose result is kept
├── MalformedStepError      a step contradicts what the worker knows; the step fails as a whole
└── DeviceFaultError        the device is gone; the process must end
    └── DeviceHungError     its thread does not come back, and nothing may wait for it
"""

import grpc

from protos.channel import Refusal, StatusError


class WorkerError(StatusError):
    """Something that the worker refuses or cannot do."""


class StartupError(WorkerError):
    """The process cannot start; the message is one line that names what is wrong."""


class OutOfMemoryAtStartError(StartupError):
    """The model's weights or the KV arena do not fit into memory."""

    def __init__(self, what: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        super().__init__(f"{what} needs {needed_bytes:,} bytes, and {free_bytes:,} bytes are free: {advice}")
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class WrongInstanceError(WorkerError):
    """The caller means another process: this one was started at an address that it knew."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    refusal = Refusal.WRONG_INSTANCE


class FencedError(WorkerError):
    """The lane epoch that the caller names is not the current one."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    refusal: Refusal | None = Refusal.FENCED_STEPS


class EpochEndedError(FencedError):
    """The lane epoch of a step that was taken has ended before it was answered; nobody did wrong."""

    refusal = None


class StepGapError(WorkerError):
    """A step is neither the next one nor one whose result is kept."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    refusal = Refusal.STEP_GAP


class MalformedStepError(WorkerError):
    """A step contradicts what the worker knows."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class DeviceFaultError(WorkerError):
    """The device can compute nothing more in this process."""


class DeviceHungError(DeviceFaultError):
    """A job does not end. Its thread cannot be stopped, so the process ends without waiting for it."""

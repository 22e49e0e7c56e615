"""Which steps this worker runs: those of one lane epoch, in order, each once, on one device thread.

    Register(epoch) ──▶ lane_epoch: what Health answers, and the only one that may be adopted
    Manifest(epoch) ──▶ adopt: queued steps are dropped, the running one is waited for, rows and results are forgotten
    Steps           ──▶ submit: step 1, 2, 3 ...; a repeat gets the answer of the first time

All of it runs on the event loop; the device thread runs jobs and nothing else. A device that does not end the running
job in time is hung, which is a fault.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from protos import worker_pb2 as pb
from worker_svc.errors import DeviceHungError, EpochEndedError, FencedError, StepGapError
from worker_svc.step import StepRunner

NUM_KEPT_RESULTS = 4
DEVICE_PATIENCE_S = 60.0  # for the running step; queued ones are dropped

_T = TypeVar("_T")


class StepFence:
    """The way to the device thread. `device` runs one job at a time, in order."""

    def __init__(self, runner: StepRunner, device: Executor, on_fault: Callable[[BaseException], None]) -> None:
        self.lane_epoch = 0  # of the last Register
        self._runner = runner
        self._device = device
        self._on_fault = on_fault
        self._obeyed_epoch: int | None = None
        self._next_step_id = 1
        self._answers: dict[int, asyncio.Future[pb.StepResult]] = {}  # by step_id, in order
        self._jobs: set[Future[pb.StepResult]] = set()
        self._adopting = asyncio.Lock()
        self._is_hung = False

    async def begin_epoch(self) -> int:
        """End the current epoch and return the next one, to register with; steps are refused until it is adopted."""
        self.lane_epoch += 1
        await self.retire()
        return self.lane_epoch

    async def retire(self) -> None:
        """Obey nobody: drop queued steps, wait for the running one, forget the rows. Seals stay.

        Raises DeviceHungError.
        """
        async with self._adopting:
            self._drop_steps()
            await self._on_device(self._runner.forget_rows)

    async def adopt(self, lane_epoch: int) -> list[pb.ManifestPart]:
        """Make `lane_epoch` the current one; return the manifest.

        Raises FencedError unless it was registered last and not adopted before, and DeviceHungError.
        """
        async with self._adopting:
            self._check_registered(lane_epoch)
            # Once, or a Manifest that is sent again could end the steps of the scheduler that sent it first.
            if lane_epoch == self._obeyed_epoch:
                raise FencedError(f"lane epoch {lane_epoch} was adopted before")
            self._drop_steps()
            manifest = await self._on_device(self._runner.fence)
            self._check_registered(lane_epoch)
            self._obeyed_epoch = lane_epoch
            return manifest

    def submit(self, request: pb.StepRequest) -> asyncio.Future[pb.StepResult]:
        """Queue a step, or find it if it is a repeat; the future is shared and must not be cancelled.

        Raises FencedError or StepGapError.
        """
        if request.lane_epoch != self._obeyed_epoch:
            raise FencedError(f"a step of lane epoch {request.lane_epoch}: the current one is {self._obeyed_epoch}")
        known = self._answers.get(request.step_id)
        if known is not None:
            return known
        if request.step_id != self._next_step_id:
            raise StepGapError(f"step {request.step_id} came where {self._next_step_id} is the next one")
        self._next_step_id += 1
        loop = asyncio.get_running_loop()
        answer = self._answers[request.step_id] = loop.create_future()
        job = self._device.submit(self._runner.run, request)
        self._jobs.add(job)
        job.add_done_callback(lambda job: loop.call_soon_threadsafe(self._finish, answer, job))
        return answer

    async def _on_device(self, job: Callable[[], _T]) -> _T:
        """Run a job behind the running one. Raises DeviceHungError when it takes too long, and from then on."""
        error = DeviceHungError(f"the device has not finished its work within {DEVICE_PATIENCE_S:g} s")
        if self._is_hung:
            raise error
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._device.submit(job)), DEVICE_PATIENCE_S)
        except TimeoutError:
            self._is_hung = True
            self._on_fault(error)
            raise error from None

    def _check_registered(self, lane_epoch: int) -> None:
        if lane_epoch != self.lane_epoch:
            raise FencedError(f"lane epoch {lane_epoch}: the last one registered is {self.lane_epoch}")

    def _finish(self, answer: asyncio.Future[pb.StepResult], job: Future[pb.StepResult]) -> None:
        self._jobs.discard(job)
        fault = None if job.cancelled() else job.exception()
        if fault is not None:
            self._on_fault(fault)
        if answer.done():  # dropped
            return
        if fault is not None:
            _set_error(answer, fault)
            return
        answer.set_result(job.result())
        finished = [step_id for step_id, kept in self._answers.items() if kept.done()]
        for step_id in finished[:-NUM_KEPT_RESULTS]:
            del self._answers[step_id]

    def _drop_steps(self) -> None:
        self._obeyed_epoch = None
        for job in self._jobs:
            job.cancel()
        for answer in self._answers.values():
            if not answer.done():
                _set_error(answer, EpochEndedError("the worker has turned to another lane epoch"))
        self._answers.clear()
        self._next_step_id = 1


def _set_error(answer: asyncio.Future[pb.StepResult], error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # nobody may be waiting for it any more

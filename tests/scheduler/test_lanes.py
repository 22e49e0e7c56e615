"""Steps over a real stream: batching, two in flight, repeats, wedges, failover."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from protos import common_pb2

from .conftest import TIMING, LoopbackCell, until
from .fake_worker import EOS_TOKEN_ID, expected_output, make_model, next_token

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [3 + (seed * 101 + position * 7) % 900 for position in range(num_tokens)]


async def test_request_gets_all_its_tokens_and_its_usage(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 100), max_tokens=40)
    await until(lambda: gateway.output("a").has_ended)
    output = gateway.output("a")
    assert output.token_ids == expected_output(prompt_of(1, 100), 40)
    assert output.finish_reason == LENGTH
    usage = output.terminal_runs[0].usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (100, 0, 40)
    assert gateway.num_gaps == 0


async def test_many_requests_share_steps_and_messages(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    worker.may_step.clear()
    gateway = await cell.add_gateway()
    for number in range(8):
        await gateway.submit(f"r{number}", prompt_of(number, 5 + number), max_tokens=20)
    await until(lambda: cell.num_seqs == 8)
    worker.may_step.set()
    await until(lambda: all(gateway.output(f"r{number}").has_ended for number in range(8)))
    for number in range(8):
        assert gateway.output(f"r{number}").token_ids == expected_output(prompt_of(number, 5 + number), 20)
    assert max(worker.step_sizes) == 8
    assert gateway.num_token_messages <= worker.num_steps


async def test_samples_of_one_request_differ_and_all_end(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 21), max_tokens=9, n=3)
    await until(lambda: all(gateway.output("a", index).has_ended for index in range(3)))
    for index in range(3):
        assert gateway.output("a", index).token_ids == expected_output(prompt_of(1, 21), 9, index)


async def test_stop_tokens_are_the_models_and_the_requests(cell: LoopbackCell) -> None:
    output = expected_output(prompt_of(1, 10), 12)
    await cell.start()
    await cell.add_worker(model=make_model(eos_token_ids=[EOS_TOKEN_ID, output[7]]))
    gateway = await cell.add_gateway()
    await gateway.submit("model's", prompt_of(1, 10), max_tokens=12)
    await gateway.submit("own", prompt_of(1, 10), max_tokens=12, sampling={"stop_token_ids": [output[3]]})
    await gateway.submit("ignored", prompt_of(1, 10), max_tokens=12, sampling={"ignore_eos": True})
    await until(lambda: all(gateway.output(name).has_ended for name in ("model's", "own", "ignored")))
    assert gateway.output("model's").token_ids == output[:8]
    assert gateway.output("model's").finish_reason == STOP
    assert gateway.output("own").token_ids == output[:4]
    assert gateway.output("ignored").token_ids == output


async def test_logprobs_come_only_where_they_were_asked_for(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("none", prompt_of(1, 10), max_tokens=3)
    await gateway.submit("chosen", prompt_of(2, 10), max_tokens=3, sampling={"num_logprobs": 0})
    await gateway.submit("top", prompt_of(3, 10), max_tokens=3, sampling={"num_logprobs": 1})
    await until(lambda: all(gateway.output(name).has_ended for name in ("none", "chosen", "top")))
    assert gateway.output("none").logprobs == []
    assert [logprobs.logprob for logprobs in gateway.output("chosen").logprobs] == [-0.5] * 3
    tops = [list(logprobs.top_token_ids) for logprobs in gateway.output("top").logprobs]
    assert tops == [[token_id] for token_id in gateway.output("top").token_ids]


async def test_two_steps_are_in_flight_and_no_more(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    worker.may_step.clear()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 10), max_tokens=10)
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 2)
    worker.may_step.set()
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 10), 10)


async def test_prefix_is_reused_by_the_same_tenant_alone(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    cached = {}
    requests: dict[str, dict[str, Any]] = {
        "first": {"tenant": "a"},
        "again": {"tenant": "a"},
        "other tenant": {"tenant": "b"},
        "other salt": {"tenant": "a", "cache_salt": "x"},
        "no reading": {"tenant": "a", "skip_cache_read": True},
    }
    for name, fields in requests.items():
        await gateway.submit(name, prompt_of(1, 100), max_tokens=2, **fields)
        await until(lambda name=name: gateway.output(name).has_ended)  # type: ignore[misc]
        cached[name] = gateway.output(name).terminal_runs[0].usage.num_cached_tokens
    assert cached == {"first": 0, "again": 96, "other tenant": 0, "other salt": 0, "no reading": 0}


async def test_broken_stream_is_dialed_again_and_its_steps_repeated(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 10), max_tokens=60)
    await until(lambda: len(gateway.output("a").token_ids) > 5)
    worker.may_step.clear()
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 2)
    worker.break_streams()
    await until(lambda: worker.num_streams == 2)
    worker.may_step.set()
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 10), 60)
    assert worker.lane_epoch == 1
    assert cell.server.figures().num_worker_losses_total == 0


async def test_result_lost_with_its_stream_is_answered_again_without_a_second_run(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    worker.num_results_to_lose = 1
    await gateway.submit("a", prompt_of(1, 10), max_tokens=30)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 10), 30)
    assert (worker.num_streams, worker.lane_epoch) == (2, 1)
    assert cell.server.figures().num_worker_losses_total == 0


async def test_stream_that_breaks_again_without_a_result_is_a_dead_lane(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    worker.num_results_to_lose = 2
    await gateway.submit("a", prompt_of(1, 10), max_tokens=30)
    await until(lambda: gateway.output("a").has_ended)
    assert cell.server.figures().num_worker_losses_total == 1
    assert worker.lane_epoch > 1, "the worker came back in a new epoch"
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 10), 30)


async def test_killed_worker_requests_finish_on_another(cell: LoopbackCell) -> None:
    await cell.start()
    first = await cell.add_worker()
    gateway = await cell.add_gateway()
    for number in range(6):
        await gateway.submit(f"r{number}", prompt_of(number, 20), max_tokens=200)
    await until(lambda: all(len(gateway.output(f"r{number}").token_ids) > 3 for number in range(6)))
    second = await cell.add_worker()
    await first.stop()
    await until(lambda: all(gateway.output(f"r{number}").has_ended for number in range(6)))
    for number in range(6):
        assert gateway.output(f"r{number}").token_ids == expected_output(prompt_of(number, 20), 200)
    assert second.num_steps > 0
    assert gateway.num_gaps == 0


async def test_wedged_worker_is_dropped_at_the_steps_deadline(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, min_step_deadline_ms=200))
    wedged = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=100)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    wedged.may_step.clear()  # its heartbeats go on
    await cell.add_worker()
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 20), 100)
    assert cell.server.figures().num_worker_losses_total == 1


async def test_step_deadline_is_long_where_steps_are_slow(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, min_step_deadline_ms=1))
    worker = await cell.add_worker(step_ms=60_000.0)  # what it says of its steps
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=100)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    worker.may_step.clear()
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 2)
    uptime_ms = cell.server.figures().uptime_ms
    await until(lambda: cell.server.figures().uptime_ms > uptime_ms + 100)
    worker.may_step.set()
    await until(lambda: gateway.output("a").has_ended)
    assert cell.server.figures().num_worker_losses_total == 0


async def test_steps_without_rows_say_nothing_of_a_steps_duration(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker(step_ms=50.0)
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=5)
    await until(lambda: gateway.output("a").has_ended and worker.step_sizes[-1] == 0)
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 0)
    (lane,) = cell.server.registry.lanes
    assert lane.driver.rates.predict_ms(1) == lane.driver.rates.last_step_ms == 50.0


@pytest.mark.parametrize(
    "seals",
    [[(64 * 256 * 8, b"a" * 32)], [(16 * 8, b"a" * 32)], [(1, b"a" * 32)], [(8, b"a" * 32), (8, b"b" * 32)]],
    ids=["beyond the last slab", "between two slabs", "another format", "twice"],
)
async def test_worker_with_an_impossible_manifest_is_dropped(
    cell: LoopbackCell, seals: list[tuple[int, bytes]]
) -> None:
    await cell.start(replace(TIMING, silence_ms=60_000))
    worker = await cell.make_worker(false_seals=seals)
    await worker.register(cell.address)
    await until(lambda: not list(cell.server.registry.lanes))
    assert not cell.server.cell.failed.done()
    worker.false_seals.clear()
    await worker.join(cell.address)
    await until(lambda: cell.is_live(worker))


async def test_worker_that_never_tells_its_manifest_is_dropped(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, manifest_ms=50, silence_ms=60_000))
    worker = await cell.make_worker()
    worker.may_tell_manifest.clear()
    await worker.register(cell.address)
    await until(lambda: not list(cell.server.registry.lanes))


async def test_silent_worker_is_dropped(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, silence_ms=300))
    worker = await cell.add_worker()
    worker.fall_silent()
    await until(lambda: not cell.is_live(worker))
    assert cell.server.figures().num_worker_losses_total == 1


async def test_failed_step_is_done_over(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=50)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    worker.fails_next_step = True
    await until(lambda: gateway.output("a").has_ended)
    assert not worker.fails_next_step
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 20), 50)


async def test_requests_wait_for_the_first_worker(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=5)
    await until(lambda: cell.server.figures().num_waiting_seqs == 1)
    await cell.add_worker()
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(prompt_of(1, 20), 5)


async def test_without_a_worker_requests_end_after_a_while(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, awaiting_model_ms=50))
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=5, n=2)
    await until(lambda: gateway.output("a", 0).has_ended and gateway.output("a", 1).has_ended)
    assert gateway.output("a").error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_request_that_no_worker_ever_took_ends_though_it_is_submitted_again(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, awaiting_model_ms=200))
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 20), max_tokens=5)
    await gateway.submit("a", prompt_of(1, 20), max_tokens=5, is_resubmit=True)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_what_was_let_in_before_a_restart_waits_longer_for_a_worker(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, awaiting_model_ms=50))
    gateway = await cell.add_gateway()
    await gateway.submit("old", prompt_of(1, 20), max_tokens=5, is_resubmit=True)
    await gateway.submit("new", prompt_of(1, 20), max_tokens=5)
    await until(lambda: gateway.output("new").has_ended)
    await cell.add_worker()
    await until(lambda: gateway.output("old").has_ended)
    assert gateway.output("old").token_ids == expected_output(prompt_of(1, 20), 5)


async def test_cached_blocks_outlive_the_scheduler(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", prompt_of(1, 100), max_tokens=40)
    await until(lambda: gateway.output("a").has_ended and len(worker.seals) >= 8)
    await asyncio.gather(gateway.close(), cell.server.stop())
    worker.fall_silent()
    cell.gateways.clear()
    await cell.start()
    await worker.join(cell.address)
    gateway = await cell.add_gateway()
    await gateway.submit("b", prompt_of(1, 100), max_tokens=40)
    await until(lambda: gateway.output("b").has_ended)
    assert gateway.output("b").token_ids == expected_output(prompt_of(1, 100), 40)
    assert gateway.output("b").terminal_runs[0].usage.num_cached_tokens == 96


async def test_stalled_loop_judges_nobody(cell: LoopbackCell) -> None:
    now_ms = 0
    await cell.start(replace(TIMING, silence_ms=3000, stall_ms=1000), clock=lambda: now_ms)
    worker = await cell.add_worker()
    worker.fall_silent()
    gateway = await cell.add_gateway()
    await until(lambda: cell.server.hub.num_sessions == 1)
    now_ms += 10_000
    # Ten ticks, the first of which finds itself late.
    for _ in range(10):
        num_messages = gateway.num_messages
        now_ms += 100
        await until(lambda n=num_messages: gateway.num_messages > n)  # type: ignore[misc]
    assert cell.is_live(worker)
    assert not gateway.ended.done()


def test_fake_worker_never_samples_the_end_of_sequence() -> None:
    assert all(next_token([seed], 0) != EOS_TOKEN_ID for seed in range(5000))

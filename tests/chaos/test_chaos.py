"""Streams while every part but the gateway is killed, stopped or cut off, each at least once: nothing is lost.

`python -m bench.chaos` is the same for ten minutes, with sampled texts among the greedy ones.
"""

from dataclasses import replace

from bench.cell_parts import FAULTS, CellParts
from bench.chaos import SETTINGS, blocks_lost, make_requests, run_chaos

DURATION_S = 45.0
PAUSE_S = (1.0, 3.0)


async def test_streams_go_on_whatever_dies() -> None:
    requests = [replace(request, temperature=0.0) for request in make_requests(8)]
    async with CellParts("bundled", 2, SETTINGS) as cell:
        outcome = await run_chaos(cell, requests, DURATION_S, seed=1, pause_s=PAUSE_S)
        log = "\n".join(cell.log)
        assert outcome.errors == [], log
        assert outcome.wrong_texts == [], log
        assert outcome.num_wrong_counts == 0
        assert outcome.num_faults.keys() == FAULTS.keys()
        assert outcome.num_requests > len(requests)
        assert await blocks_lost(cell) == 0, log

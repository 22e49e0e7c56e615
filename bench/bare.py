"""The bare forward pass: the worker's own decoder and kernels in one process, with nothing around them.

Import it after `worker_svc.threads.prepare_environment`, as the worker does: it loads torch.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch

from bench.cell import model_folder
from kernels.dispatch import backend_for
from kernels.formats import PLACES_PER_SLAB, Format, entry
from worker_svc.arena_plan import ArenaPlan, plan_arena
from worker_svc.batch import StepBatch
from worker_svc.compute import ModelCompute
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.folder import CONFIG_FILE
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder

BLOCK_SIZE = 16
ARENA_BYTES = 512 * 1024**2


class BareDecode:
    """A batch of rows that decode, each in blocks of its own."""

    def __init__(self, model: str, dtype: str, num_rows: int) -> None:
        folder = Path(model_folder(model))
        device = torch.device("cpu")
        config = ModelConfig.from_hf(json.loads((folder / CONFIG_FILE).read_bytes()))
        decoder = Decoder.load(config, Checkpoint(folder), getattr(torch, dtype), device)
        backend = backend_for(device)
        plan = plan_arena(ARENA_BYTES, config.num_layers, lambda blocks: decoder.layout(BLOCK_SIZE, blocks))
        backend.warm_up(plan.layout, config.num_heads, decoder.attention_params)
        self._compute = ModelCompute(decoder, backend, plan, plan.allocate(device))
        blocks_per_row = plan.num_blocks // num_rows
        self._block_ids = _block_ids(plan)[: num_rows * blocks_per_row].reshape(num_rows, blocks_per_row)
        self._num_rows = num_rows

    def step_ms(self, first_position: int, num_steps: int) -> float:
        """Return the mean milliseconds of a forward pass with logits, over steps from `first_position` on."""
        batches = [self._batch(position) for position in range(first_position, first_position + num_steps)]
        begin_s = time.perf_counter()
        for batch in batches:
            self._compute.forward(batch)
        return 1e3 * (time.perf_counter() - begin_s) / num_steps

    def _batch(self, position: int) -> StepBatch:
        num_rows, num_blocks = self._num_rows, position // BLOCK_SIZE + 1
        table = self._block_ids[:, :num_blocks]
        entries = np.array([[entry(int(block), Format.NATIVE) for block in row] for row in table], dtype=np.int32)
        return StepBatch(
            token_ids=np.arange(1000, 1000 + num_rows),
            positions=np.full(num_rows, position),
            slot_mapping=table[:, -1] * BLOCK_SIZE + position % BLOCK_SIZE,
            block_table=entries,
            context_lens=np.full(num_rows, position + 1, dtype=np.int32),
            cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
            max_query_len=1,
            written_entries=entries[:, -1].astype(np.int64),
            sampling_slots=np.arange(num_rows),
            sampling_token_idxs=np.arange(num_rows),
        )


def _block_ids(plan: ArenaPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the ids of all of an arena's blocks, in order."""
    slabs, places = np.divmod(np.arange(plan.num_blocks), plan.layout.slab_blocks)
    return slabs * PLACES_PER_SLAB + places

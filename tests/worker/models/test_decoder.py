"""The paged decoder against `transformers`: the same logits however a sequence is cut, batched and cached."""

import random
from pathlib import Path

import pytest
import torch

from kernels.dispatch import Backend, backend_for
from kernels.reference import ReferenceBackend
from tests.worker.models.checkpoints import CONFIGS, CPU, VOCAB_SIZE, Saved, save
from tests.worker.models.paged_run import PagedRun, Row
from worker_svc.models import decoder
from worker_svc.models.elementwise import TorchElementwise
from worker_svc.models.linear import PlainHead, PlainLinear

BACKENDS = {"cpu": lambda: backend_for(CPU), "reference": ReferenceBackend}


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


def random_tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def assert_logits_match(saved: Saved, row: Row, tolerance: float = 1e-4) -> None:
    """Every position that the row has computed has the logits of one forward pass over the row's tokens."""
    expected = saved.expected_logits(row.token_ids)
    for position, logits in row.logits.items():
        torch.testing.assert_close(logits, expected[position], rtol=0.0, atol=tolerance)


def test_one_prefill_equals_one_forward(saved: Saved, backend: Backend) -> None:
    run = PagedRun(saved.load(), backend, block_size=16)
    row = run.add(random_tokens(45, seed=1))
    run.step([(row, 45)])
    assert len(row.logits) == 45
    assert_logits_match(saved, row)


def test_mixed_prefill_decode_and_cached_prefix_equal_one_forward(saved: Saved, backend: Backend) -> None:
    run = PagedRun(saved.load(), backend, block_size=8)
    first = run.add(random_tokens(40, seed=2))
    second = run.add(random_tokens(21, seed=3))
    run.step([(first, 11), (second, 19)])  # two chunks that end inside a block
    run.step([(second, 1), (first, 21)])  # a decode beside a chunk, and rows in another order
    # Shares three full blocks with the first, and goes on otherwise.
    third = run.add(first.token_ids[:24] + random_tokens(15, seed=4), prefix_of=first, num_cached=24)
    run.step([(first, 1), (third, 9), (second, 1)])
    for _ in range(6):
        run.step([(third, 1), (first, 1)])
    assert (first.num_left, second.num_left, third.num_left) == (1, 0, 0)
    assert len(third.logits) == 15  # what was cached was not computed again
    for row in (first, second, third):
        assert_logits_match(saved, row)


def test_any_chunking_gives_the_same_logits(saved: Saved) -> None:
    generator = random.Random(5)
    run = PagedRun(saved.load(), backend_for(CPU), block_size=8)
    rows = [run.add(random_tokens(length, seed=length)) for length in (1, 7, 33, 64, 50)]
    while unfinished := [row for row in rows if row.num_left]:
        chosen = generator.sample(unfinished, generator.randint(1, len(unfinished)))
        run.step([(row, generator.randint(1, min(row.num_left, 13))) for row in chosen])
    for row in rows:
        assert len(row.logits) == len(row.token_ids)
        assert_logits_match(saved, row)


@pytest.mark.parametrize("wanted", [[], [0], [5, 2], list(range(12))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_some_tokens_are_those_of_all(dtype: torch.dtype, wanted: list[int], tmp_path: Path) -> None:
    run = PagedRun(save("llama-llama3-rope", tmp_path, dtype).load(dtype), backend_for(CPU), block_size=16)
    first, second = run.add(random_tokens(8, seed=1)), run.add(random_tokens(4, seed=2))
    hidden, arena = run.forward([(first, 8), (second, 4)]), run.arena.clone()
    run.arena.zero_()
    some = run.forward([(first, 8), (second, 4)], wanted=torch.tensor(wanted, dtype=torch.int64))
    assert torch.equal(run.arena, arena)  # all tokens' keys and values were written
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(some, hidden[wanted], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = save("llama-llama3-rope", tmp_path, dtype)
    run = PagedRun(saved.load(dtype), backend_for(CPU), block_size=16)
    row = run.add(random_tokens(40, seed=6))
    run.step([(row, 30)])
    for _ in range(10):
        run.step([(row, 1)])
    spread = float(saved.expected_logits(row.token_ids).std())
    eps = torch.finfo(dtype).eps
    # CPUs that multiply bfloat16 round what goes into every product; the others round what goes into the cache alone.
    assert_logits_match(saved, row, tolerance=16 * eps * spread)


def test_float32_compute_on_a_bfloat16_checkpoint_is_exact(tmp_path: Path) -> None:
    saved = save("llama-tied", tmp_path, torch.bfloat16)
    run = PagedRun(saved.load(torch.float32), backend_for(CPU), block_size=16)
    row = run.add(random_tokens(20, seed=7))
    run.step([(row, 20)])
    assert_logits_match(saved, row)


def test_logits_are_float32_and_may_be_of_no_row(tmp_path: Path) -> None:
    loaded = save("llama-tied", tmp_path, torch.bfloat16).load(torch.bfloat16)
    assert loaded.compute_logits(torch.empty(0, 48)).shape == (0, VOCAB_SIZE)
    logits = loaded.compute_logits(torch.ones(4, 48)[::2])
    assert (logits.dtype, logits.shape) == (torch.float32, (2, VOCAB_SIZE))


@pytest.mark.parametrize(
    ("dtype", "saved_dtype", "embedding_bytes_per_element"),
    [(torch.float32, torch.float32, 4), (torch.float32, torch.bfloat16, 2), (torch.bfloat16, torch.float32, 2)],
)
def test_embedding_is_held_in_the_narrower_dtype(
    dtype: torch.dtype, saved_dtype: torch.dtype, embedding_bytes_per_element: int, tmp_path: Path
) -> None:
    loaded = save("llama-tied", tmp_path, saved_dtype).load(dtype)
    assert loaded._embedding.nbytes == VOCAB_SIZE * 48 * embedding_bytes_per_element


def bytes_of_model(saved: Saved) -> int:
    """All parameters in float32, and the cosines and sines of 256 positions for 8 pairs of channels."""
    return 4 * sum(parameter.numel() for parameter in saved.model.parameters()) + 2 * 4 * 256 * 8


def test_weight_bytes_counts_every_parameter(tmp_path: Path) -> None:
    saved = save("llama-llama3-rope", tmp_path)
    assert saved.load(torch.float32).weight_bytes == bytes_of_model(saved)


def test_a_position_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    run = PagedRun(save("llama-tied", tmp_path).load(), ReferenceBackend(), block_size=16, num_slabs=8)
    row = run.add(random_tokens(257, seed=9))
    run.step([(row, 256)])
    with pytest.raises(IndexError):
        run.step([(row, 1)])


def test_layout_carries_the_models_kv_shape(tmp_path: Path) -> None:
    layout = save("llama-tied", tmp_path).load(torch.bfloat16).layout(block_size=16, slab_blocks=4)
    assert (layout.num_kv_heads, layout.head_size, layout.block_size) == (2, 16, 16)
    assert (layout.native_dtype, layout.slab_blocks) == ("bfloat16", 4)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have decoders do on the CPU what they do on other devices."""
    monkeypatch.setattr(decoder, "elementwise_for", lambda _device, _dtype: TorchElementwise())
    monkeypatch.setattr(decoder, "make_linear", lambda weight, bias, _device: PlainLinear(weight, bias))
    monkeypatch.setattr(decoder, "make_head", lambda weight, _device: PlainHead(weight))
    monkeypatch.setattr(decoder, "activation_dtype", lambda dtype, _device: dtype)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-llama3-rope", "qwen2-window"])
def test_half_precision_activations_of_other_devices_stay_within_their_rounding(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = save(name, tmp_path, dtype)
    run = PagedRun(saved.load(dtype), ReferenceBackend(), block_size=16)
    row = run.add(random_tokens(40, seed=6))
    run.step([(row, 30)])
    for _ in range(10):
        run.step([(row, 1)])
    spread = float(saved.expected_logits(row.token_ids).std())
    assert_logits_match(saved, row, tolerance=32 * torch.finfo(dtype).eps * spread)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_what_other_devices_run_gives_the_same_logits(tmp_path: Path) -> None:
    saved = save("llama-tied", tmp_path)
    plain = saved.load()
    run = PagedRun(plain, ReferenceBackend(), block_size=16)
    row = run.add(random_tokens(30, seed=8))
    run.step([(row, 23)])
    for _ in range(7):
        run.step([(row, 1)])
    assert_logits_match(saved, row)
    # The tied head and the embedding are one tensor, counted once.
    assert plain.weight_bytes == bytes_of_model(saved)

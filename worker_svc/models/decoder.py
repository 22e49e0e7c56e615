"""The decoder: one forward pass of a ragged batch over the paged KV cache.

A step's tokens of all rows lie end to end in one [T] axis, prefill chunks and single decode tokens alike. Only
attention knows of rows; everything else works token by token:

    hidden ─▶ norm ─▶ QKV ─▶ rotate ─▶ write KV ─▶ attention ─▶ O ─▶ + ─▶ norm ─▶ gate, up ─▶ silu · ─▶ down ─▶ + ─▶ ...

Q, K and V are one product, and so are gate and up. Residual additions are folded into the norm that follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, AttentionParams, Backend
from kernels.formats import KVLayout
from worker_svc.kv import check_weights_fit
from worker_svc.models.config import ModelConfig
from worker_svc.models.elementwise import Elementwise, elementwise_for
from worker_svc.models.linear import Linear, PlainHead, activation_dtype, make_head, make_linear
from worker_svc.models.rotary import Rotary
from worker_svc.models.weights import TensorSource, WeightReader


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block's weights."""

    input_norm: Tensor  # [H]
    qkv: Linear
    output: Linear
    post_norm: Tensor  # [H]
    gate_up: Linear
    down: Linear

    @property
    def weight_bytes(self) -> int:
        """Bytes held."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        return sum(linear.weight_bytes for linear in linears) + self.input_norm.nbytes + self.post_norm.nbytes


class Decoder:
    """A loaded model. It holds weights and nothing of any step, so a forward has no state but the arena's."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor,
        layers: list[Layer],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._activation_dtype = activation_dtype(dtype, self.device)
        self._rotary = Rotary(config.head_size, config.rope, config.max_position_embeddings, self.device)
        self._product_dtype = layers[0].qkv.dtype
        self._elementwise: Elementwise = elementwise_for(self.device, self._product_dtype)
        self.attention_params = AttentionParams(config.head_size**-0.5, config.sliding_window)

    @classmethod
    def load(cls, config: ModelConfig, checkpoint: TensorSource, dtype: torch.dtype, device: torch.device) -> "Decoder":
        """Read a checkpoint and pack its weights for `dtype` (compute and native KV) on `device`.

        Raises the checkpoint's own error for a missing tensor, TensorError for one of a wrong shape or one that has no
        place in the architecture; each names the tensor. Raises OutOfMemoryAtStartError before memory runs out.
        """
        reader = WeightReader(checkpoint)
        embedding, head = _read_embedding_and_head(reader, config, dtype, device)
        layers: list[Layer] = []
        for layer in _read_layers(reader, config, dtype, device):
            if not layers:  # the others take as much, which may be more than in the file: packing pads
                check_weights_fit((config.num_layers - 1) * layer.weight_bytes, device)
            layers.append(layer)
        final_norm = _read_norm(reader, "model.norm.weight", config, dtype, device)
        reader.check_all_taken()
        return cls(config, dtype, embedding, layers, final_norm, head)

    @property
    def weight_bytes(self) -> int:
        """Bytes in memory: weights as packed (an embedding that the head shares counts once), rotation tables."""
        shared = isinstance(self._head, PlainHead) and self._head.weight is self._embedding
        head_bytes = 0 if shared else self._head.weight_bytes
        layer_bytes = sum(layer.weight_bytes for layer in self._layers)
        return self._embedding.nbytes + layer_bytes + self._final_norm.nbytes + head_bytes + self._rotary.table_bytes

    def layout(self, block_size: int, slab_blocks: int = 16) -> KVLayout:
        """Return the shape of this model's KV in blocks of `block_size` tokens, `slab_blocks` native ones a slab."""
        return KVLayout(
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            block_size=block_size,
            native_dtype=str(self.dtype).removeprefix("torch."),
            slab_blocks=slab_blocks,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        arena: Tensor,
        batch: AttentionBatch,
        slot_mapping: Tensor,
        backend: Backend,
        layout: KVLayout,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Run a step's T tokens through all layers and return hidden states after the final norm.

        Those of all tokens, [T, H]; or [R, H], those of the tokens at the indices `wanted` (int64 [R], R may be 0):
        nobody reads the others' beyond the last layer's keys and values. `token_ids`, `positions` (below the config's
        `max_position_embeddings`) and `slot_mapping` are int64 [T] in the order of `batch.cu_seqlens_q`; `arena` is
        uint8 [num_layers, num_slabs, slab_bytes] and gets the tokens' keys and values at `slot_mapping`.
        """
        config, elementwise, eps = self.config, self._elementwise, self.config.rms_norm_eps
        split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        cos, sin = self._rotary.at(positions)
        residual = torch.embedding(self._embedding, token_ids).to(self._activation_dtype)
        delta = torch.zeros_like(residual, dtype=self._product_dtype)
        # Written anew by every layer.
        normed = torch.empty_like(delta)
        attended = delta.new_empty(len(delta), config.num_heads, config.head_size)
        attended_rows = attended.flatten(1)
        gated = delta.new_empty(len(delta), config.intermediate_size)
        for layer, layer_arena in zip(self._layers, arena.unbind(0), strict=True):
            elementwise.add_rms_norm(residual, delta, layer.input_norm, eps, normed)
            heads = layer.qkv(normed).view(-1, sum(split), config.head_size)
            heads = elementwise.rotate(heads, config.num_heads + config.num_kv_heads, cos, sin)
            query, key, value = torch.split_with_sizes(heads, split, dim=1)
            backend.write_kv(layer_arena, key, value, slot_mapping, layout)
            backend.paged_attention(query, layer_arena, batch, self.attention_params, layout, attended)
            if wanted is not None and layer is self._layers[-1]:
                if not len(wanted):
                    return residual[:0]
                residual, attended_rows = residual.index_select(0, wanted), attended_rows.index_select(0, wanted)
                normed, gated = normed[: len(wanted)], gated[: len(wanted)]
            delta = layer.output(attended_rows)
            elementwise.add_rms_norm(residual, delta, layer.post_norm, eps, normed)
            elementwise.silu_mul(layer.gate_up(normed), gated)
            delta = layer.down(gated)
        hidden = torch.empty_like(residual)
        elementwise.add_rms_norm(residual, delta.to(hidden.dtype), self._final_norm, eps, hidden)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab], of hidden states [R, H]; R may be 0."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return self._head(hidden.contiguous())


def _read_norm(
    reader: WeightReader, name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Tensor:
    weight = reader.take(name, config.hidden_size).to(dtype)
    return weight.to(device=device, dtype=activation_dtype(dtype, device), copy=True)


def _read_embedding_and_head(
    reader: WeightReader, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Linear]:
    """Return the embedding table and the head, which on a GPU share one tensor where they are tied.

    On a CPU the head is packed, so a tied table is held beside it. Rows are read from it one by one, which costs the
    same in any dtype: it stays in the checkpoint's where that is the narrower one.
    """
    shape = (config.vocab_size, config.hidden_size)
    source = reader.take("model.embed_tokens.weight", *shape)
    narrow = device.type == "cpu" and source.element_size() < dtype.itemsize
    table = source.to(device=device, dtype=source.dtype if narrow else dtype, copy=True)
    if config.tie_word_embeddings:
        reader.ignore("lm_head.weight")
        return table, make_head(table.to(dtype), device)
    return table, make_head(reader.take("lm_head.weight", *shape).to(dtype), device)


def _read_layers(
    reader: WeightReader, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[Layer]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    for layer_idx in range(config.num_layers):
        prefix = f"model.layers.{layer_idx}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        projections = [("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        qkv = reader.stack([(f"{attention}{name}.weight", rows) for name, rows in projections], hidden)
        qkv_bias = None
        if config.family.qkv_bias:
            qkv_bias = reader.stack([(f"{attention}{name}.bias", rows) for name, rows in projections]).to(dtype)
        output = reader.take(f"{attention}o_proj.weight", hidden, query_rows)
        gate_up = reader.stack([(f"{mlp}{name}_proj.weight", intermediate) for name in ("gate", "up")], hidden)
        down = reader.take(f"{mlp}down_proj.weight", hidden, intermediate)
        yield Layer(
            input_norm=_read_norm(reader, f"{prefix}input_layernorm.weight", config, dtype, device),
            qkv=make_linear(qkv.to(dtype), qkv_bias, device),
            output=make_linear(output.to(dtype), None, device),
            post_norm=_read_norm(reader, f"{prefix}post_attention_layernorm.weight", config, dtype, device),
            gate_up=make_linear(gate_up.to(dtype), None, device),
            down=make_linear(down.to(dtype), None, device),
        )

"""Models: from a checkpoint's config and tensors to logits over the paged KV cache.

One decoder (`decoder.py`) serves every family; what a family does differently is a row of the table in `families.py`.
`config.py` reads a Hugging Face config and refuses what would be computed wrongly, `weights.py` reads tensors and
refuses wrong shapes, `linear.py` picks how matrix products run on this machine, `rotary.py` and `elementwise.py` are
the rest.

    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    decoder = Decoder.load(config, Checkpoint(folder), torch.bfloat16, torch.device("cpu"))
    hidden = decoder.forward(token_ids, positions, arena, batch, slot_mapping, backend, layout)
    logits = decoder.compute_logits(hidden[last_token_of_each_row])

Nothing here knows of schedulers, rows or requests: a step's ragged batch comes in as tensors.
"""

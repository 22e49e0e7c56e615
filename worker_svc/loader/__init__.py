"""From what a user types as `--model` to a Hugging Face folder, and from that folder to tensors.

`resolve` finds the folder (`hub` downloads one, `gguf_import` makes one out of a GGUF file, once), `checkpoint` reads
its weights, `fingerprint` names its contents. `python -m worker_svc.loader MODEL` prints the folder.
"""

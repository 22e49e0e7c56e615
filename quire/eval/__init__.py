"""`quire eval`: what a KV precision policy costs in quality, and what it saves in bytes, on any model folder.

`policies` reads which ones are measured; `loading` brings the model; `paged` steps sequences under a policy as
scheduler and worker would; `text`, `choices`, `generation` and `humaneval` are the tasks; `results` keeps what they
found, so that a run that was cut goes on; `summary`, `table` and `plot` show it. `python -m quire.eval` is what
`quire eval` runs: it alone of the `quire` package may import the scheduler's policies and the worker's model and
kernels.
"""

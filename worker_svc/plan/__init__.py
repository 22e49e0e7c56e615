"""`quire plan`: how many sequences a device's memory holds, in every KV format. Needs neither torch nor the device.

`shape` reads what is planned for, `memory` reckons by the same `arena_plan` as the worker does, `table` and `plot` show
it. `python -m worker_svc.plan` is what `quire plan` runs: formats' sizes are the worker's to know, not the command's.
"""

"""The worker: runs the scheduler's steps on a model and a paged KV arena of its own, and decides nothing."""

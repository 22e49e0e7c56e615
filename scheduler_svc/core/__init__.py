"""The scheduler's decisions, pure: no I/O, no clock, no randomness; imports only itself, block_hash and the library."""

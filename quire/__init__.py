"""The `quire` command: one process that starts a cell on this machine, keeps it running and stops it again."""

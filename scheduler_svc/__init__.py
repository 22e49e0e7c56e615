"""The scheduler: the one writer of a cell's state. `core/` decides, and this shell carries messages to it and from it.

    gateway ──Session──▶ session.py ──▶ cell.py ──▶ core/ ◀── cell.py ◀── lane_driver.py ◀──Steps──▶ worker
                         outbox.py  ◀── runs                              registry.py    ◀──Register, Heartbeat

Everything runs on one event loop, and whatever touches the core is synchronous: no state changes during an await.
"""

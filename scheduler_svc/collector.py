"""How often the garbage collector stops the scheduler."""

import gc

# Python collects when 700 more objects were made than freed. At 256 rows that took 1 to 4 % of the core's time, and a
# full collection, which the blocks that steps seal set off in the end, stopped every lane for 18 to 37 ms (arena of
# 20,000 blocks). The scheduler makes few cycles, so little waits for a collection: 50,000 objects are some 10 MB.
_YOUNG_OBJECTS = 50_000


def collect_rarely() -> None:
    """Keep what lives now out of all collections, and collect new objects rarely. Call it at the end of start-up.

    What start-up made lives as long as the process: a full collection would look at all of it, and stall every lane.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])

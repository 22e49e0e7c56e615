"""What can be wrong with a model that was found and read; each message is one line for the person who wants it served.

Both are ModelErrors of `worker_svc.loader.errors`, like all that ends a load.
"""

from worker_svc.loader.errors import CheckpointError, ModelError


class UnsupportedModelError(ModelError):
    """The config asks for what no family here computes; the message names the architecture or the field."""


class TensorError(CheckpointError):
    """A checkpoint's tensor has the wrong shape, or no place in the architecture; the message names it."""

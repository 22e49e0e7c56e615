"""What the kernels refuse. Each error is a sentence that names the value at fault and the limit."""


class KernelError(Exception):
    """A launch cannot be carried out as asked."""


class UnsupportedDeviceError(KernelError):
    """No backend serves the device."""


class UnsupportedShapeError(KernelError):
    """A layout, head count, dtype or stride that the backend has no kernel for."""


class UnsupportedFormatError(KernelError):
    """A block-table entry carries a format code that the operation has no kernel for."""


class InvalidBatchError(KernelError):
    """A row's lengths contradict each other, its block table or the number of query tokens."""


class OutOfArenaError(KernelError):
    """A block-table entry, or a slot, names a place outside the arena."""

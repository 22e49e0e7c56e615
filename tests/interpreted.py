"""Triton's interpreter, which runs kernels on a CPU, one program after the other in NumPy.

Whether a kernel is interpreted or compiled is decided when its module is imported. The test process interprets them;
the environment is left as it was, so that child processes do not.
"""

import importlib
import os
from types import ModuleType

SWITCH = "TRITON_INTERPRET"


def import_interpreted(name: str) -> ModuleType:
    """Import a module whose kernels are to be interpreted; the first import of it in the process decides."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from kernels.dispatch import Backend, backend_for
from kernels.reference import ReferenceBackend
from tests.interpreted import SWITCH


@pytest.fixture(scope="session")
def cpu() -> Backend:
    return backend_for(torch.device("cpu"))


@pytest.fixture(scope="session")
def reference() -> Backend:
    return ReferenceBackend()


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton see that it interprets, for what it imports at a launch; sum every row of a product in one order.

    NumPy's own product takes another order for some rows of a tile than for others, on some CPUs.
    """
    monkeypatch.setenv(SWITCH, "1")
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(_builder: Any, a: Any, b: Any, total: Any, *_precision: Any) -> Any:
        assert a.dtype.primitive_bitwidth > 8, "codes are not numbers"
        wide = total.data.dtype
        product = np.einsum("mk,kn->mn", a.data.astype(wide), b.data.astype(wide))
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

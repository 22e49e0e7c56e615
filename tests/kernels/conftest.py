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
    """Let Triton see that it interprets, for what it imports at a launch."""
    monkeypatch.setenv(SWITCH, "1")

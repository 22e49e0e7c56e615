import pytest
import torch

from kernels.dispatch import Backend, backend_for
from kernels.reference import ReferenceBackend


@pytest.fixture(scope="session")
def cpu() -> Backend:
    return backend_for(torch.device("cpu"))


@pytest.fixture(scope="session")
def reference() -> Backend:
    return ReferenceBackend()

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.fakes import Cell, make_model_folder, running_cell


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cell(model_folder: Path) -> AsyncIterator[Cell]:
    async with running_cell(model_folder) as running:
        yield running

"""The bundled model's folder, in the user's own cache where it stays, and an empty cache for other models."""

from pathlib import Path

import pytest

from worker_svc.loader.resolve import BUNDLED, resolve_model


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    return resolve_model(BUNDLED, print)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache root; models are imported into `quire/models` below it."""
    root = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "quire" / "models"

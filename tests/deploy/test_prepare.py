"""`python -m quire.prepare`: secrets are made once, the model's folder and name are written at every start."""

import re
import stat
from pathlib import Path

import pytest

from quire.prepare import main
from tests.worker.models.checkpoints import save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama-tied", tmp_path_factory.mktemp("models") / "small").folder


def prepare(folder: Path, model: Path | str, *flags: str) -> dict[str, str]:
    """Run it and return what is in the files."""
    folders = ("--settings-folder", str(folder / "cell"), "--redis-folder", str(folder / "redis"))
    for name in ("cell", "redis"):
        (folder / name).mkdir(exist_ok=True)
    assert main(["--model", str(model), *folders, *flags]) == 0
    return {path.name: path.read_text().strip() for path in folder.glob("*/*")}


def test_files_hold_what_services_need(tmp_path: Path, model: Path) -> None:
    files = prepare(tmp_path, model)
    assert re.fullmatch(r"[0-9a-f]{64}", files["quire_cluster_token"])
    assert files["quire_model"] == str(model)
    assert files["quire_served_model_name"] == "small"
    password = files["redis.conf"].removeprefix("requirepass ")
    assert re.fullmatch(r"[0-9a-f]{64}", password)
    assert files["quire_redis_url"] == f"redis://:{password}@redis:6379/0"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in tmp_path.glob("*/*"))


def test_secrets_stay_and_the_name_follows(tmp_path: Path, model: Path) -> None:
    first = prepare(tmp_path, model)
    second = prepare(tmp_path, model, "--served-model-name", "other")
    assert second == first | {"quire_served_model_name": "other"}


def test_given_token_replaces_the_one_that_is_there(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, model)
    assert "--force-recreate" not in capsys.readouterr().out
    assert prepare(tmp_path, model, "--cluster-token", "chosen")["quire_cluster_token"] == "chosen"
    assert "--force-recreate" in capsys.readouterr().out
    prepare(tmp_path, model, "--cluster-token", "chosen")
    assert "--force-recreate" not in capsys.readouterr().out, "it is the same"


def test_half_written_redis_secrets_are_made_anew_together(tmp_path: Path, model: Path) -> None:
    first = prepare(tmp_path, model)
    (tmp_path / "redis" / "quire_redis_url").unlink()
    second = prepare(tmp_path, model)
    assert second["redis.conf"] != first["redis.conf"]
    assert second["redis.conf"].removeprefix("requirepass ") in second["quire_redis_url"]


def test_missing_model_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "no-such-model")
    folders = ("--settings-folder", str(tmp_path), "--redis-folder", str(tmp_path))
    assert main(["--model", missing, *folders]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert missing in lines[0]


def test_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--settings-folder", str(tmp_path / "none"), "--redis-folder", str(tmp_path)]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err

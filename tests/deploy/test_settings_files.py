"""Settings in files: where they are looked for, and what counts before them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protos.settings_files import FOLDERS_VARIABLE, settings_folders
from tests.deploy.engine import ROOT


def test_folders_that_are_not_there_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    named = os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")])
    assert settings_folders({FOLDERS_VARIABLE: named}) == [tmp_path / "a"]


def test_no_folders_can_be_asked_for() -> None:
    assert settings_folders({FOLDERS_VARIABLE: ""}) == []


def read_token(settings: str, folders: list[Path], **variables: str) -> str:
    """What a service that starts with these folders takes for the cluster token."""
    module, name = settings.rsplit(".", 1)
    environ = os.environ | {FOLDERS_VARIABLE: os.pathsep.join(map(str, folders))} | variables
    program = f"from {module} import {name}; print({name}().cluster_token)"
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    "settings",
    [
        "gateway.settings.GatewaySettings",
        "scheduler_svc.settings.SchedulerSettings",
        "worker_svc.settings.WorkerSettings",
    ],
)
def test_cluster_token_comes_from_a_file(tmp_path: Path, settings: str) -> None:
    made, mounted = tmp_path / "made", tmp_path / "mounted"
    made.mkdir()
    mounted.mkdir()
    (made / "quire_cluster_token").write_text("made\n")
    assert read_token(settings, [made, mounted]) == "made"
    (mounted / "quire_cluster_token").write_text("mounted\n")
    assert read_token(settings, [made, mounted]) == "mounted"
    assert read_token(settings, [made, mounted], QUIRE_CLUSTER_TOKEN="variable") == "variable"


def test_file_that_may_not_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder, file = Path(name), Path(name) / "quire_cluster_token"
        file.write_text("secret")
        folder.chmod(0o755)
        file.chmod(0)
        program = (
            "import os\n"
            "from protos.settings import SettingsMistakeError, read_settings\n"
            "from worker_svc.settings import WorkerSettings\n"
            "if os.geteuid() == 0: os.seteuid(65534)\n"  # root may read whatever there is
            "try: read_settings(WorkerSettings, [])\n"
            "except SettingsMistakeError as error: print(error)"
        )
        environ = os.environ | {FOLDERS_VARIABLE: name}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert result.stdout == f"cannot read {file}: Permission denied\n"

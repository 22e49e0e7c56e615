"""`quire plan` from the outside: every kind of model, a table, JSON, a plot, and one line for what goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.formats import Format
from tests.worker.loader.fake_hub import FakeHub, serving
from tests.worker.loader.gguf_files import write_llama
from tests.worker.plan.cases import LLAMA_2_7B, LLAMA_2_70B
from worker_svc.plan import __main__ as command
from worker_svc.plan.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights."""
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def quire_plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", "plan", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_table_has_a_line_for_every_format(llama_folder: Path) -> None:
    result = quire_plan("--model", str(llama_folder), "--memory", "80GiB", "--dtype", "float16")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "Llama-2-7b-hf: 32 layers, 32 KV heads of size 128"
    assert lines[1].startswith("80.00 GiB x 0.9 - 12.55 GiB of weights = 59.45 GiB for KV: 475 slabs of 128.00 MiB")
    (native,) = (line for line in lines if line.startswith("native (float16)"))
    assert native.split()[2:] == ["512.00", "KiB", "100.0%", "1.00", "GiB", "16", "7,600", "59", "59"]
    assert {fmt.name.lower() for fmt in Format} <= {line.split()[0] for line in lines if line}


def test_json_has_the_same(llama_folder: Path) -> None:
    result = quire_plan("--model", str(llama_folder), "--memory", "80GiB", "--output", "json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert (plan["model"], plan["num_parameters"], plan["num_slabs"]) == ("Llama-2-7b-hf", 6_738_415_616, 475)
    assert plan["formats"].keys() == {fmt.name.lower() for fmt in Format}
    native = plan["formats"]["native"]
    assert (native["token_bytes"], native["sequence_bytes"], native["num_sequences"]) == (524_288, 1024**3, 59)


def test_reader_that_leaves_is_no_error() -> None:
    command_line = [sys.executable, "-m", "quire", "plan", "--kv-cache-memory", "1GiB"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""


def test_bundled_model_is_the_default() -> None:
    result = quire_plan("--kv-cache-memory", "1GiB", "--output", "json")
    assert json.loads(result.stdout)["formats"]["native"]["token_bytes"] == 22.5 * 1024


def test_gguf_file_is_planned_without_importing_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = write_llama(tmp_path / "tiny.gguf")
    flags = ("--kv-cache-memory", "1MiB", "--mean-length", "64", "--output", "json")
    result = quire_plan("--model", str(path), *flags, XDG_CACHE_HOME=str(cache))
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert (plan["model"], plan["num_layers"], plan["num_kv_heads"], plan["head_size"]) == ("tiny", 2, 2, 16)
    assert not cache.exists()


def test_of_a_hub_repository_the_configuration_alone_is_fetched(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(LLAMA_2_70B).encode(), "model.safetensors": b"138 GB"}
    with serving(FakeHub("owner/llama", files)) as hub:
        hub_variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        result = quire_plan("--model", "owner/llama", "--memory", "320GiB", "--output", "json", **hub_variables)
    assert result.returncode == 0, result.stderr
    assert hub.fetched == {"config.json"}
    plan = json.loads(result.stdout)
    assert (plan["model"], plan["weight_bytes"]) == ("owner/llama", 137_953_296_384)
    assert plan["formats"]["native"]["token_bytes"] == 320 * 1024


def test_repository_without_configuration_is_named(tmp_path: Path) -> None:
    with serving(FakeHub("owner/data", {"data.csv": b"1"})) as hub:
        hub_variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        result = quire_plan("--model", "owner/data", "--memory", "320GiB", **hub_variables)
    assert (result.returncode, result.stdout) == (1, "")
    assert "owner/data on the Hugging Face Hub has no config.json" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        ("{", (), "cannot read "),
        ("[]", (), "not a JSON object"),
        ('{"architectures": ["GPT2LMHeadModel"]}', (), "unsupported architecture GPT2LMHeadModel"),
        (json.dumps(LLAMA_2_70B), (), "weights needs 137,953,296,384 bytes, and 77,309,411,328 bytes are free"),
        (json.dumps(LLAMA_2_7B), ("--mean-length", "5000"), "--mean-length 5000"),
    ],
    ids=["damaged", "no-object", "architecture", "too-large", "too-long"],
)
def test_model_that_cannot_be_planned_is_one_line(
    llama_folder: Path, config: str, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (llama_folder / "config.json").write_text(config)
    assert main(["--model", str(llama_folder), "--memory", "80GiB", *flags]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("quire plan: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/no/such", "--memory", "80GiB"]) == 1
    assert capsys.readouterr().err == "quire plan: model folder not found: /no/such\n"


def test_plot_is_a_png(llama_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["--model", str(llama_folder), "--memory", "80GiB", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(PNG_MAGIC)


def test_plot_that_cannot_be_written_is_one_line(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "no-such-folder" / "plan.png"
    assert main(["--model", str(llama_folder), "--memory", "80GiB", "--plot", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_plot_without_its_library_says_how_to_install_it(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PLOT_PACKAGE", "no_such_package_here")
    path = tmp_path / "plan.png"
    assert main(["--model", str(llama_folder), "--memory", "80GiB", "--plot", str(path)]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "pip install matplotlib" in captured.err
    assert not path.exists()


def test_planning_needs_neither_torch_nor_matplotlib(llama_folder: Path) -> None:
    code = (
        "import sys; from worker_svc.plan.__main__ import main;"
        f"code = main(['--model', {str(llama_folder)!r}, '--memory', '80GiB']);"
        "heavy = {'torch', 'numba', 'numpy', 'matplotlib', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'{code}, {heavy}' if code or heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr

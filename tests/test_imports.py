"""The import rules, read from the source: they keep the services apart and the scheduler's core pure.

A service imports `protos` and itself; only the worker imports `kernels`; the core of the scheduler imports itself, the
block hash and the standard library; the `quire` command imports the services' settings and nothing else of them.
`quire.eval`, a process of its own, measures the core's policies on the worker's model and kernels, and imports both.
"""

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = frozenset({"protos", "gateway", "scheduler_svc", "worker_svc", "kernels", "quire"})

# What each package may import of ours: a module, and all below it.
ALLOWED = {
    "protos": {"protos"},
    "kernels": {"kernels"},
    "gateway": {"gateway", "protos"},
    "scheduler_svc": {"scheduler_svc", "protos"},
    "worker_svc": {"worker_svc", "protos", "kernels"},
    "quire": {
        "quire",
        "protos.channel",
        "protos.credentials",
        "protos.settings",
        "protos.settings_files",
        "protos.watched_files",
        "gateway.settings",
        "scheduler_svc.settings",
        "scheduler_svc.core.precision",
        "worker_svc.settings",
    },
    # A package of its own, whose files do not count as those of `quire`.
    "quire.eval": {
        "quire.eval",
        "protos.settings",
        "scheduler_svc.core.precision",
        "worker_svc",
        "kernels",
    },
}
TORCH_FREE = ("gateway", "scheduler_svc", "protos", "quire")
# Files that are read before anything heavy may be: settings, and what takes a package's name.
LIGHT_FILES = (
    "protos/settings.py",
    "gateway/settings.py",
    "scheduler_svc/settings.py",
    "scheduler_svc/index/redis_url.py",
    "scheduler_svc/core/precision.py",
    "scheduler_svc/core/types.py",
    "worker_svc/settings.py",
    "kernels/__init__.py",
)
LIGHT_THIRD_PARTY = frozenset({"pydantic", "pydantic_settings", "protos"})


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, inside functions too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *([node.module] if node.module else [])))
            # `from protos import common_pb2` imports a module, `from protos.channel import X` a name: both are below.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def source_files(package: str) -> list[Path]:
    inner = [folder_of(name) for name in ALLOWED if name.startswith(f"{package}.")]
    return [
        path
        for path in sorted(folder_of(package).rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc")) and not any(map(path.is_relative_to, inner))
    ]


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_imports_only_what_it_may(package: str) -> None:
    files = source_files(package)
    assert files
    for path in files:
        ours = {module for module in imported_modules(path) if top(module) in OURS}
        forbidden = sorted(module for module in ours if not is_within(module, ALLOWED[package]))
        assert not forbidden, f"{path.relative_to(ROOT)} imports {forbidden}"


def test_command_does_not_import_what_it_becomes() -> None:
    for path in source_files("quire"):
        found = [module for module in imported_modules(path) if is_within(module, {"quire.eval"})]
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_scheduler_core_imports_itself_block_hash_and_standard_library() -> None:
    for path in source_files("scheduler_svc.core"):
        for module in imported_modules(path):
            allowed = top(module) in sys.stdlib_module_names
            allowed = allowed or is_within(module, {"scheduler_svc.core", "protos.block_hash"})
            assert allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_scheduler_core_reads_no_clock_and_does_no_io() -> None:
    impure = {"asyncio", "logging", "os", "random", "selectors", "socket", "subprocess", "threading", "time"}
    for path in source_files("scheduler_svc.core"):
        found = {top(module) for module in imported_modules(path)} & impure
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_only_worker_and_kernels_import_torch(package: str) -> None:
    for path in source_files(package):
        heavy = {top(module) for module in imported_modules(path)} & {"torch", "numba", "triton"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


@pytest.mark.parametrize("name", LIGHT_FILES)
def test_light_file_imports_nothing_heavy(name: str) -> None:
    for module in imported_modules(ROOT / name):
        allowed = top(module) in sys.stdlib_module_names or top(module) in LIGHT_THIRD_PARTY
        allowed = allowed or f"{module.rpartition('.')[0].replace('.', '/')}.py" in LIGHT_FILES
        assert allowed, f"{name} imports {module}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_transformers_is_for_tests_only(package: str) -> None:
    for path in source_files(package):
        assert "transformers" not in {top(module) for module in imported_modules(path)}, path.relative_to(ROOT)


def test_command_starts_without_heavy_libraries() -> None:
    heavy = ("torch", "numba", "transformers", "fastapi", "uvicorn", "tokenizers")
    code = f"import sys, quire.serve; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_unrelated_package_named_kernels_is_not_installed() -> None:
    installed = {(dist.metadata["Name"] or "").lower() for dist in importlib.metadata.distributions()}
    assert "kernels" not in installed, (
        "PyPI's `kernels` hides this project's folder of that name: pip uninstall kernels"
    )

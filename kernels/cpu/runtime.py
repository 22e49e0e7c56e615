"""Where compiled kernels are cached, how functions are compiled, and the threads that run them.

Threads are torch's own: kernels run on the OpenMP runtime that torch has loaded, by its entry point GOMP_parallel.
Numba's threading layer would bring a second runtime into the process (its wheel asks for a libgomp of another name),
whose threads and torch's then spin against each other at every change between a kernel and a matrix product.
"""

import ctypes
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from llvmlite import binding as llvm


def _cache_folder() -> Path:
    """Return the folder for compiled code: one for each state of the sources, of the compiler and of the CPU.

    Numba notices a change in the file of a function, not in those of the functions that it calls or of the constants
    that it takes from the folder above.
    """
    key, folder = hashlib.sha256(), Path(__file__).parent
    for source in sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")]):
        key.update(source.read_bytes())
    versions = (platform.python_version(), llvm.llvm_version_info, torch.__version__)
    features = sorted(HOST_FEATURES)  # a set's own order is another one in every process
    key.update(repr((versions, platform.machine(), llvm.get_host_cpu_name(), features)).encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "quire" / "numba" / key.hexdigest()[:16]


def _set_cache_folder() -> None:
    """Point Numba at our cache folder, or at a temporary one if that cannot be written. The user's choice stays."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    folder = _cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    os.environ["NUMBA_CACHE_DIR"] = str(folder) if writable else tempfile.mkdtemp(prefix="quire-numba-")


HOST_FEATURES = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
_set_cache_folder()

import numba  # noqa: E402  (it reads NUMBA_CACHE_DIR when it is loaded)

# Numba's own annotations know nothing of these options.
_config: Any = numba.config
_njit: Any = numba.njit
_cfunc: Any = numba.cfunc
_typeof: Any = numba.typeof

_config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]  # in case somebody loaded it before

Function = TypeVar("Function", bound=Callable[..., Any])
ParallelCall = Callable[[int, int, int, int], None]  # body, argument, number of threads, flags: as GOMP_parallel
# No fast-math: every sum has one order, so that a row's result never depends on how its loop was compiled.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def compiled(function: Function) -> Function:
    """Compile a module-level function at its first call, once for each combination of argument types."""
    return cast(Function, _njit(cache=True, **_OPTIONS)(function))


def compiled_short(function: Function) -> Function:
    """As `compiled`, for what takes a few microseconds: it keeps the GIL.

    Another thread that took it in between would keep it for longer than the work takes.
    """
    return cast(Function, _njit(cache=True, **_OPTIONS | {"nogil": False})(function))


def inlined(function: Function) -> Function:
    """As `compiled`, for a function that only compiled ones call: it is compiled, and cached, with them."""
    return cast(Function, _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function))


def instruction(emitter: Callable[..., Any]) -> Any:
    """Make a function for compiled code from one that says what LLVM instructions it becomes, for what arguments."""
    return numba.extending.intrinsic(emitter)


def literal_instruction(emitter: Callable[..., Any]) -> Any:
    """As `instruction`, for one that looks at the values of constants that it is given."""
    return numba.extending.intrinsic(prefer_literal=True)(emitter)


def c_function(function: Callable[..., None], num_addresses: int, tag: Any = None) -> int:
    """Compile a module-level function into a C function of so many addresses, or load it; returns its address.

    A function with a tag (see `vector`) takes it as one more argument, whose type alone matters: callers pass none.
    """
    arguments = [numba.types.int64] * num_addresses + ([] if tag is None else [_typeof(tag)])
    body = _cfunc(numba.types.void(*arguments), cache=True, boundscheck=False, error_model="numpy")(function)
    _KEPT.append(body)
    return cast(int, body.address)


_KEPT: list[Any] = []  # compiled code lives as long as its Python object


def run_on_threads(body: int, argument: int, num_threads: int) -> None:
    """Call the C function `body(argument)` once on each of `num_threads` threads, the caller's among them.

    Always ask for as many threads as torch does, or for one: to any other number the OpenMP runtime would have to make
    or end threads, in turn with torch.
    """
    _parallel_call()(body, argument, num_threads, 0)


@cache
def _parallel_call() -> ParallelCall:
    """Return GOMP_parallel(body, argument, num_threads, flags) of torch's OpenMP runtime, or what does the same."""
    torch_folder = str(Path(torch.__file__).parent)
    runtimes = sorted(loaded_openmp_runtimes(), key=lambda path: not path.startswith(torch_folder))
    for path in [*runtimes, None]:
        call = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if call is not None:
            call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            call.restype = None
            return cast(ParallelCall, call)
    return pool_parallel


def loaded_openmp_runtimes() -> list[str]:
    """Return the paths of the OpenMP libraries in this process (none where /proc does not say)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "omp" in line and "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))


def pool_parallel(body: int, argument: int, num_threads: int, _flags: int) -> None:
    """Do as GOMP_parallel where the runtime lacks it (LLVM's on macOS): Python threads, which C functions let run."""
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    others = [_pool().submit(call, argument) for _ in range(num_threads - 1)]
    call(argument)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "kernels")

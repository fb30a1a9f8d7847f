"""What a machine must have before anything of ours runs on it: the first steps of first light."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.gpu.first_light import tell
from benchmarks.machine import versions

PACKAGES: Final = (
    *("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "structlog", "safetensors", "pytest"),
)
SUPPORTED: Final = (2, 13)
"""The version of torch on CUDA that is supported; older ones run, and this step says what is known of them."""

IMPORTS: Final = (
    *("ferrum_rpc.engine.assembly.build", "ferrum_rpc.serve", "ferrum_rpc.worker", "ferrum_rpc.client"),
    *("benchmarks.gpu.check", "tests.support.checkpoints", "transformers"),
    *("pytest", "pytest_asyncio", "xdist", "hypothesis"),
)
TOOLS: Final = ("compute-sanitizer", "ncu", "nvidia-smi", "gcc")


def machine(*, rehearse: bool) -> int:
    """Versions and the device. Fails without one."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        each, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": each.name,
                "capability": f"{each.major}.{each.minor}",
                "multiprocessors": each.multi_processor_count,
                "l2_mib": each.L2_cache_size >> 20,
                "memory_gib": round(total / 2**30, 1),
                "free_gib": round(free / 2**30, 1),
            }
        )
    tools = {name: shutil.which(name) or "not here" for name in TOOLS}
    own = {"cuda": torch.version.cuda, "driver": _driver(), "devices": devices}
    tell({"packages": versions(PACKAGES), "tools": tools} | own)
    if tuple(map(int, torch.__version__.split(".")[:2])) < SUPPORTED:
        print(f"torch {torch.__version__}: {'.'.join(map(str, SUPPORTED))} is supported on CUDA; older ones may fail")
        print("after a CUDA graph capture that failed (step 4.capture)")
    if not devices and not rehearse:
        print("torch finds no CUDA device: either this machine has none, or the driver or torch's build does not match")
        print(f"torch {torch.__version__} was built for CUDA {torch.version.cuda}")
        return 1
    return 0


def imports(*, rehearse: bool) -> int:
    """Import what the steps import. Names everything that is missing at once."""
    missing = []
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever it raises, the next one is worth a try
            missing.append(f"cannot import {name}: {type(error).__name__}: {error}")
    print(*missing, sep="\n")
    if missing:
        print("put the wheels of what is missing into wheels/ beside the tree: make first-light-wheels")
    return int(bool(missing))


def compiler(*, rehearse: bool) -> int:
    """Compile a library with Python's and CUDA's headers, as Triton does when a kernel is first launched."""
    import triton

    include = sysconfig.get_paths(scheme="posix_prefix")["include"]
    cuda = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    tool = shutil.which("gcc") or shutil.which("clang")
    if tool is None:
        print("there is no gcc and no clang: Triton cannot launch a kernel")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n#include <cuda.h>\nCUresult probe(void) { return CUDA_SUCCESS; }\n")
        command = [tool, "-shared", "-fPIC", f"-I{include}", f"-I{cuda}", str(source), "-o", str(Path(folder, "p.so"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr, end="")
    print(f"{tool}: {'compiles with' if not done.returncode else 'FAILED with'} {include} and {cuda}")
    return done.returncode


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()

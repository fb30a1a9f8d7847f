"""The C library built in other ways: watched by sanitizers, by Clang, and for a CPU without any of its instructions.

What a compiler or an emulator is missing for is skipped. Clang and the ARM64 cross compiler are Debian's `clang` and
`gcc-aarch64-linux-gnu`, the emulator is `qemu-user`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrum_rpc.native import library

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = sorted((ROOT / "ferrum_rpc_kernels" / "src").glob("*.c"))
PORTABLE = HERE / "portable.c"
CACHE = ROOT / ".cache" / "objects"
FLAGS = ("-w", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
ALONE = (f"-I{SOURCES[0].parent}", "-include", f"{HERE / 'portable.h'}")
"""For portable C, which fuses no products, and whose results are the same everywhere to the last bit."""

FEWER = ("-DGEMM_ROWS=2", "-DSPECIALIZED=0")
"""A third of the copies of the loops over rows, and one of attention: copies take most of the time to compile."""

EMULATED = ("-include", f"{HERE / 'emulated_amx.h'}")
"""Every CPU with AVX-512 BF16 and VNNI has AMX."""

ELSEWHERE = """
import sys
import pytest
from ferrum_rpc.native import library
folder, _, library.PACKAGE = sys.argv[1].rpartition("/")
sys.path.append(folder)
library.load()
assert sys.argv[1] in open("/proc/self/maps").read()
sys.exit(pytest.main(sys.argv[2:]))
"""
EVERY_KERNEL = (
    "test_fused_ops or (exact_one and not (portable and (2112 or 4160))) "
    "or (have_the_same_bits and not (2112 or 4160)) or lie_apart or what_is_no_number or new_tokens "
    "or short_and_long or odd_width or (head_and_block and -any) or (eight_bit_mixes and 48-None-5.0-torch.bfloat16) "
    "or (key_that_is_no and 20-None) or (soft and (avx2-ByteFactory-auto or avx512-Pair or amx-Pair)) "
    "or (c_draws and not 33000) or (each_alone and native) or product_of_any_size or stand_for or every_number "
    "or (single_tokens and amx and recurrent) or few_on_any "
    "or (are_those_of_torch and not (portable-torch.float32 or avx2-torch.bfloat16)) or products_of_heads"
)
"""Every function of the library in every instruction set, few cells of each."""


def tool(name):
    """Its path, or a visible skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def compiled(compiler, sources, *options):
    """Objects of ``sources``, compiled two at once. They stay in the checkout for the next run, which takes them if
    compiler, options, headers and source are the same."""
    said = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    headers = sorted([*SOURCES[0].parent.glob("*.h"), *HERE.glob("*.h")])
    how = digest(said, *FLAGS, *map(str, options))
    wanted = {each: f"{digest(*(file.read_bytes() for file in (*headers, each)))}.o" for each in sources}
    folders = {each: CACHE / f"{each.stem}-{how}" for each in sources}
    waiting, running = [each for each in sources if not (folders[each] / wanted[each]).exists()], []
    waiting.sort(key=lambda each: each.stat().st_size)
    while waiting or running:
        while waiting and len(running) < 2:
            source = waiting.pop()
            folders[source].mkdir(parents=True, exist_ok=True)
            made = folders[source] / f"{os.getpid()}"
            command = [compiler, *FLAGS, *options, "-c", source, "-o", made]
            running.append((source, made, subprocess.Popen(command)))
        source, made, process = running.pop(0)
        assert process.wait() == 0
        target = folders[source] / wanted[source]
        for older in {*folders[source].glob("*.o")} - {target}:
            older.unlink(missing_ok=True)
        made.rename(target)
    return [folders[each] / wanted[each] for each in sources]


def digest(*parts):
    """Of all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def build(compiler, folder, *options):
    """The library in ``folder``."""
    links = [each for each in options if each.startswith("-fsanitize")]
    objects = compiled(compiler, SOURCES, *options)
    subprocess.run([compiler, "-shared", *links, *objects, "-o", folder / library.LIBRARY], check=True)


def run_kernels(folder, **environment):
    """The tests of every kernel, with the library of ``folder``."""
    files = [
        HERE / f"test_{each}.py"
        for each in (
            *("fused_ops", "linear", "attention", "eight_bits", "native_layers", "draws", "adapters"),
            *("exact_spans", "native_recurrent"),
        )
    ]
    command = [sys.executable, "-c", ELSEWHERE, folder, "-q", "-x", "-p", "no:cacheprovider", "-k", EVERY_KERNEL]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_kernels_touch_no_memory_but_theirs_and_rely_on_nothing_undefined(tmp_path):
    compiler = tool("cc")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("the compiler has no address sanitizer of its own to preload")
    # Sizes of objects are the address sanitizer's too, and take a third of the time to compile.
    watched = ("-fsanitize=address,undefined", "-fno-sanitize=object-size", "-fno-sanitize-recover=undefined")
    build(compiler, tmp_path, "-O1", "-fopenmp", *FEWER, *EMULATED, *watched)
    run_kernels(tmp_path, LD_PRELOAD=found.stdout.strip(), ASAN_OPTIONS="detect_leaks=0")  # Python's own are many


def test_clang_builds_kernels_that_are_right(tmp_path):
    """In one thread: its OpenMP is another than torch's."""
    build(tool("clang"), tmp_path, "-O1")
    run_kernels(tmp_path)


def run_portable(folder, compiler, *options, emulator=()):
    """The bits that the portable code computes."""
    program, links = folder / "portable", [each for each in options if each == "-static"]
    objects = compiled(compiler, [PORTABLE, *SOURCES], *ALONE, *options)
    subprocess.run([compiler, *links, *objects, "-o", program, "-lm"], check=True)
    done = subprocess.run([*emulator, program], capture_output=True, text=True, check=True)
    has, _, bits = done.stdout.partition("\n")
    assert has == "portable lanes 4 pairs 4 bytes 4 prefill 0"
    # products; tasks by tensors and attention in two dtypes; long spans; rows and recurrence in two dtypes
    assert bits.count("\n") == 6 + 18 + 3 + 12
    return bits


@pytest.fixture(scope="module")
def unoptimized(tmp_path_factory):
    return run_portable(tmp_path_factory.mktemp("unoptimized"), tool("cc"), "-O0")


def test_optimized_code_computes_the_same_bits(tmp_path, unoptimized):
    assert run_portable(tmp_path, tool("cc"), "-O1") == unoptimized


def test_clang_computes_the_same_bits(tmp_path, unoptimized):
    assert run_portable(tmp_path, tool("clang"), "-O1") == unoptimized


def test_arm64_takes_the_portable_vectors_and_computes_the_same_bits(tmp_path, unoptimized):
    other, emulator = tool("aarch64-linux-gnu-gcc"), tool("qemu-aarch64")
    assert run_portable(tmp_path, other, "-O1", "-static", emulator=[emulator]) == unoptimized

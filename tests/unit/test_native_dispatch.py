"""A kernel runs where the CPU has all that it is compiled for, and nowhere else.

The library is compiled once more, with a CPU whose features are a list here. Nothing of it is run but what it says of
itself, so any machine will do.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ferrum_rpc.native import library

SOURCES = Path(__file__).parents[2] / "ferrum_rpc_kernels" / "src"
FILES = ("attention_decode.c", "norm_rope_gate.c", "linear.c", "attention_prefill.c", "group.c", "lora.c")
VECTORS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vnni")
FEATURES = (*VECTORS, "amx-tile", "amx-bf16", "amx-int8")


def isa_of_long_spans(cpu):
    """Its name is the first of the set, which is the first of the kernel."""
    cpu.ferrum_prefill_new.restype = ctypes.c_void_p
    kernel = cpu.ferrum_prefill_new(None)
    if kernel is None:
        return None
    chosen = ctypes.c_void_p.from_address(kernel).value
    cpu.ferrum_prefill_free(ctypes.c_void_p(kernel))
    return ctypes.c_char_p.from_address(chosen).value


def in_avx2(lanes, *arguments):
    """Whether a function that says its lanes computes so where AVX-512 is hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRUM_ISA", "avx2")
        return lanes(*arguments) == 8


KERNELS = {
    "attention in avx512": ("run_unit_avx512", lambda cpu: cpu.ferrum_decode_supported(b"avx512", 64)),
    "attention in avx2": ("run_unit_avx2", lambda cpu: cpu.ferrum_decode_supported(b"avx2", 64)),
    "rows in avx512": ("run_row_avx512", lambda cpu: cpu.ferrum_rows_lanes(64) == 16),
    "rows in avx2": ("run_row_avx2", lambda cpu: cpu.ferrum_rows_lanes(8) == 8),
    "sums of ranks in avx512": ("sum_parts_avx512", lambda cpu: cpu.ferrum_rows_lanes(64) == 16),
    "sums of ranks in avx2": ("sum_parts_avx2", lambda cpu: cpu.ferrum_rows_lanes(8) == 8),
    "products of pairs in amx": ("pairs_amx", lambda cpu: cpu.ferrum_linear_supported(library.PAIRS) == 32),
    "products of bytes in amx": ("bytes_amx", lambda cpu: cpu.ferrum_linear_supported(library.BYTES) == 32),
    "products of nibbles in amx": ("bytes_amx", lambda cpu: cpu.ferrum_linear_supported(library.NIBBLES) == 32),
    "products of MXFP4 in amx": ("mxfp4_bytes_amx", lambda cpu: cpu.ferrum_linear_supported(library.MXFP4) == 32),
    "products of IQ4 in amx": ("bytes_amx", lambda cpu: cpu.ferrum_linear_supported(library.IQ4) == 32),
    "products of pairs in avx512": ("pairs_avx512", lambda cpu: cpu.ferrum_linear_supported(library.PAIRS) >= 16),
    "products of bytes in avx512": ("bytes_avx512", lambda cpu: cpu.ferrum_linear_supported(library.BYTES) >= 16),
    "products of nibbles in avx512": ("nibbles_avx512", lambda cpu: cpu.ferrum_linear_supported(library.NIBBLES) >= 16),
    "products of MXFP4 in avx512": ("mxfp4_avx512", lambda cpu: cpu.ferrum_linear_supported(library.MXFP4) >= 16),
    "products of IQ4 in avx512": ("iq4_avx512", lambda cpu: cpu.ferrum_linear_supported(library.IQ4) >= 16),
    "products of pairs in avx2": ("pairs_avx2", lambda cpu: in_avx2(cpu.ferrum_linear_supported, library.PAIRS)),
    "products of bytes in avx2": ("bytes_avx2", lambda cpu: in_avx2(cpu.ferrum_linear_supported, library.BYTES)),
    "products of nibbles in avx2": ("nibbles_avx2", lambda cpu: in_avx2(cpu.ferrum_linear_supported, library.NIBBLES)),
    "products of MXFP4 in avx2": ("mxfp4_avx2", lambda cpu: in_avx2(cpu.ferrum_linear_supported, library.MXFP4)),
    "products of IQ4 in avx2": ("bytes_avx2", lambda cpu: in_avx2(cpu.ferrum_linear_supported, library.IQ4)),
    "adapters in avx512": ("add_b_avx512", lambda cpu: cpu.ferrum_lora_lanes() == 16),
    "products of adapters in avx512": ("lora_avx512", lambda cpu: cpu.ferrum_lora_lanes() == 16),
    "adapters in avx2": ("add_b_avx2", lambda cpu: in_avx2(cpu.ferrum_lora_lanes)),
    "products of adapters in avx2": ("lora_avx2", lambda cpu: in_avx2(cpu.ferrum_lora_lanes)),
    "long spans in avx2": ("prefill_avx2", lambda cpu: cpu.ferrum_prefill_supported(b"avx2", 64)),
    "tiles of long spans in avx2": ("run_tile_avx2", lambda cpu: cpu.ferrum_prefill_supported(b"avx2", 64)),
    "long spans in avx512": ("prefill_avx512", lambda cpu: cpu.ferrum_prefill_supported(b"avx512", 64)),
    "tiles of long spans in avx512": ("run_tile_avx512", lambda cpu: cpu.ferrum_prefill_supported(b"avx512", 64)),
    "long spans in pairs": ("prefill_avx512_bf16", lambda cpu: isa_of_long_spans(cpu) in {b"avx512_bf16", b"amx"}),
    "long spans in amx": ("pairs_amx", lambda cpu: isa_of_long_spans(cpu) == b"amx"),
}
"""The outermost function of each that is compiled for instructions, and whether it may run."""

CPU = r"""
#include <string.h>
char shown[200]; /* each with a space behind it */
int refused; /* 1: the system gives no tiles */
int has(const char *feature)
{
    const char *at = strstr(shown, feature);
    return at && at[strlen(feature)] == ' ';
}
"""


HAS = """
#include <unistd.h>
int has(const char *);
extern int refused;
#define __builtin_cpu_supports(feature) has(feature)
#define __builtin_cpu_is(vendor) has(vendor)
#define syscall(...) (refused)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The library on a CPU that has the features which are passed."""
    if platform.machine() != "x86_64":
        pytest.skip("the sets are those of x86-64")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cpu")
    (folder / "cpu.c").write_text(CPU)
    (folder / "has.h").write_text(HAS)
    sources = [SOURCES / each for each in FILES]
    fewer = ("-DGEMM_ROWS=2", "-DSPECIALIZED=0")  # copies of loops, none of which runs
    command = ["cc", "-O0", "-shared", "-fPIC", "-w", *fewer, "-include", "has.h", *sources, "cpu.c", "-o", "cpu.so"]
    subprocess.run(command, cwd=folder, check=True)
    made = ctypes.CDLL(str(folder / "cpu.so"))

    def with_features(features):
        (ctypes.c_char * 200).in_dll(made, "shown").value = "".join(f"{each} " for each in features).encode()
        return made

    return with_features


@pytest.fixture(scope="module")
def compiled_for(machine):
    """What the compiler may use in each function that names a target."""
    found = {}
    for file in FILES:
        text = subprocess.run(["cc", "-E", "-P", SOURCES / file], check=True, capture_output=True, text=True).stdout
        for target, name in re.findall(r'target\(((?:"[^"]*"\s*)+)\)+\s*void (\w+)\(const struct', text):
            words = target.replace('"', "").replace(" ", "").split(",")
            found[name] = {each for each in words if not each.startswith("prefer")}
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_needs_exactly_what_it_is_compiled_for(machine, compiled_for, kernel):
    function, supported = KERNELS[kernel]
    needed = compiled_for[function]
    assert needed <= set(FEATURES)
    assert supported(machine(needed))
    for feature in FEATURES:
        assert bool(supported(machine(set(FEATURES) - {feature}))) == (feature not in needed), feature


AVX512 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")


@pytest.mark.parametrize(
    ("features", "kernels", "lanes"),
    [
        ((), [4, 4, 0, 0], 4),
        (("avx2", "fma", "f16c"), [8, 8, 8, 1], 8),
        (AVX512, [16, 8, 8, 1], 16),
        ((*AVX512, "avx512vnni"), [16, 16, 8, 1], 16),  # Cascade Lake, Ice Lake
        ((*AVX512, "avx512bf16"), [16, 8, 16, 1], 16),
        (VECTORS, [16, 16, 16, 1], 16),
        (FEATURES, [32, 32, 16, 1], 16),
        (("amx-tile", "amx-bf16", "amx-int8"), [4, 4, 0, 0], 4),
        (("avx512bf16", "avx512vnni", "avx512f"), [4, 4, 0, 0], 4),
    ],
    ids=["nothing", "AVX2", "AVX-512", "VNNI", "BF16", "both", "AMX", "AMX alone", "half of it"],
)
def test_each_cpu_takes_what_it_has(machine, features, kernels, lanes):
    """``kernels``: floats of a vector of products of pairs, of bytes and of adapters, and whether long spans have
    attention."""
    cpu = machine(features)
    products = [cpu.ferrum_linear_supported(kind) for kind in (library.PAIRS, library.BYTES)]
    assert [*products, cpu.ferrum_lora_lanes(), cpu.ferrum_prefill_supported(None, 128)] == kernels
    assert cpu.ferrum_rows_lanes(64) == lanes
    cpu.ferrum_decode_new.restype = ctypes.c_void_p
    cpu.ferrum_decode_name.restype = ctypes.c_char_p
    kernel = ctypes.c_void_p(cpu.ferrum_decode_new(None, 128))
    assert cpu.ferrum_decode_name(kernel) == {4: b"portable", 8: b"avx2", 16: b"avx512"}[lanes]
    cpu.ferrum_decode_free(kernel)


def test_tiles_that_the_system_refuses_are_not_used(machine):
    cpu = machine(FEATURES)
    refused = ctypes.c_int.in_dll(cpu, "refused")
    refused.value = 1
    assert cpu.ferrum_linear_supported(library.PAIRS) == 16
    refused.value = 0
    assert cpu.ferrum_linear_supported(library.PAIRS) == 32


def test_a_cpu_of_intel_multiplies_pairs_in_float32_unless_a_mask_asks_for_its_instruction(machine, monkeypatch):
    """Rows of floats, 4 bytes for each element, are what tells the two apart."""
    for features, expected in (((*VECTORS, "intel"), (4, b"avx512")), (VECTORS, (0, b"avx512_bf16"))):
        cpu = machine(features)
        assert (cpu.ferrum_linear_prepared(library.PAIRS), isa_of_long_spans(cpu)) == expected
    monkeypatch.setenv("FERRUM_ISA", "avx512")
    cpu = machine((*VECTORS, "intel"))
    assert (cpu.ferrum_linear_prepared(library.PAIRS), isa_of_long_spans(cpu)) == (0, b"avx512_bf16")


@pytest.mark.parametrize(("isa", "lanes"), [("portable", 4), ("avx2", 8), ("avx512", 16)])
def test_a_mask_hides_what_a_cpu_has(machine, monkeypatch, isa, lanes):
    monkeypatch.setenv("FERRUM_ISA", isa)
    cpu = machine(FEATURES)
    assert cpu.ferrum_rows_lanes(64) == lanes
    assert {cpu.ferrum_linear_supported(kind) for kind in (library.PAIRS, library.BYTES)} == {lanes}
    assert cpu.ferrum_lora_lanes() == (lanes if lanes > 4 else 0)
    assert isa_of_long_spans(cpu) == {4: None, 8: b"avx2", 16: b"avx512_bf16"}[lanes]
    assert machine(("avx2", "fma", "f16c")).ferrum_rows_lanes(64) == min(lanes, 8)

"""The compiled library is of the sources that Python was written for, or it is not used."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ferrum_rpc.native import library

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "ferrum_rpc_kernels" / "src"
PINNED = {34: "8d1f7aae"}
"""What Python declares a second time, by version: see the test that reads it."""


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ('#include "abi.c"', ["-DFERRUM_ABI_VERSION=99"]),
        ('#include "abi.c"', ["-Dtable_start=table_start, *added"]),
        ("int nothing;", []),
    ],
    ids=["version", "size", "before there were versions"],
)
def test_a_library_of_other_sources_is_refused_and_says_what_to_run(tmp_path, monkeypatch, source, options):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "source.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", f"-I{SOURCES}", *options, "source.c", "-o", library.LIBRARY]
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(library, "find", lambda: str(tmp_path / library.LIBRARY))
    with pytest.raises(OSError, match=r"built from other sources .*: install ferrum-rpc-kernels .*make setup"):
        library.load.__wrapped__()


def test_the_library_of_a_checkout_is_no_older_than_its_sources():
    """Or the tests are of other code than what they are read beside."""
    try:
        library.load()
    except OSError as reason:
        pytest.skip(str(reason))
    built = Path(library.find())
    if not built.is_relative_to(ROOT):
        pytest.skip("the library is not this checkout's")
    changed = [each.name for each in SOURCES.iterdir() if each.stat().st_mtime > built.stat().st_mtime]
    assert not changed, "build it again: cd ferrum_rpc_kernels && python setup.py build_ext --inplace"


def test_what_python_declares_again_changes_with_its_version():
    """A struct or a function that changed under the same number would pass a stale library: raise both versions, and
    pin what is printed here."""
    structs = "span_arrays|row_kind|row_task|matrix|expert_layer|recurrent_weights|layer_weights|attention_layer"
    structs += "|attention_step|draw|penalty|row_mask|limits|lora_part|lora_change|lora_rows|lora_step"
    structs += "|recurrent_layer|recurrent_job|decay_rows|gated_rows"
    declared = []
    for path in sorted(SOURCES.iterdir()):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        declared += re.findall(rf"^(?:struct (?:{structs})|enum \w+) \{{.*?\}};", text, re.DOTALL | re.MULTILINE)
        declared += re.findall(r"^[\w *]+\bferrum_\w+\([^)]*\)(?=\s*\{)", text, re.MULTILINE)
    assert {re.split(r"\W+", each)[1] for each in declared} >= set(structs.split("|"))
    words = sorted({" ".join(each.split()) for each in declared})
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
    assert PINNED.get(library.ABI_VERSION) == digest, f"{len(words)} declarations: {digest}"


def test_make_builds_again_after_a_source_changed(tmp_path):
    """`make setup` is what the refusal says to run."""
    source, installed = "ferrum_rpc_kernels/src/norm_rope_gate.c", ".venv/.server"
    for name in ("pyproject.toml", "constraints.txt", source, installed, ".venv/.dev"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000, 1000))
    shutil.copy(ROOT / "Makefile", tmp_path)
    setup = ["make", "--question", "setup"]
    assert subprocess.run(setup, cwd=tmp_path, check=False).returncode == 0
    os.utime(tmp_path / source, (1001, 1001))
    assert subprocess.run(setup, cwd=tmp_path, check=False).returncode == 1


def test_the_runtime_is_found_in_a_folder_with_spaces_in_its_name() -> None:
    maps = "\n".join(
        (
            "7f0d2a000000-7f0d2a021000 rw-p 00000000 00:00 0 ",
            "7f0d2b000000-7f0d2b008000 r--p 00000000 fe:00 1180  /my own/check out/torch.libs/libgomp-a34b.so.1.0.0",
            "7f0d2b008000-7f0d2b02c000 r-xp 00008000 fe:00 1180    /usr/lib/libomp.so",
            "7f0d2c000000-7f0d2c001000 r--p 00000000 fe:00 1181  /my own/check out/torch/libgomp-users.txt",
            "7f0d2d000000-7f0d2d001000 r--p 00000000 fe:00 1182  /gone/libgomp.so.1 (deleted)",
        )
    )
    assert library.mapped_runtimes(maps) == ["/my own/check out/torch.libs/libgomp-a34b.so.1.0.0", "/usr/lib/libomp.so"]

"""R13, safe weight files, and R24, a configuration that is honoured or refused, at the size of the soak: their tests
with more rounds, in a process of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from tests.faults.figures import Figures, exactly
from tests.faults.sizes import Size
from tests.support.process import ROOT, environment

FUZZ: Final = (
    "tests/unit/test_weights_fuzz.py",
    "tests/quantized/test_formats.py::test_mutated_tensors_end_in_typed_errors_or_are_multiplied",
    "tests/quantized/test_gguf.py::test_mutated_files_end_in_typed_errors_or_load",
)
CONFIGURATIONS: Final = ("tests/numerics/test_config_keys.py", "tests/unit/test_weights_checkpoint.py")


async def r13_weights_are_data(size: Size) -> Figures:
    """Run the fuzz of headers, offsets, configurations and index files, and of the formats of quantized weights."""
    status, said = await _run(FUZZ, FERRUM_FUZZ_ROUNDS=size.weight_files)
    return Figures(
        "Weight files are data",
        exactly("exit status of the fuzz", status, 0),
        facts={"files": size.weight_files, "said": said},
    )


async def r24_a_configuration_is_honoured_or_refused(size: Size) -> Figures:
    """Other values of every key of transformers' classes, alone and together; sizes, heads and weights that are not
    what the configuration says."""
    status, said = await _run(CONFIGURATIONS, FERRUM_CONFIG_ROUNDS=size.configurations)
    return Figures(
        "A configuration is honoured or refused",
        exactly("exit status of the tests", status, 0),
        facts={"configurations of several keys": size.configurations, "said": said},
    )


async def _run(tests: tuple[str, ...], **rounds: int) -> tuple[int, list[str]]:
    """Exit status and last line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", *tests),
        cwd=ROOT,
        env={**environment(), **{name: str(count) for name, count in rounds.items()}, "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace").splitlines()[-1:]

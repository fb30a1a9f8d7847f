"""R13, safe weight files, at the size of the soak: the fuzz test with more rounds, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from tests.faults.figures import Figures, exactly
from tests.faults.process import ROOT, environment
from tests.faults.sizes import Size

TEST: Final = "tests/unit/test_weights_fuzz.py"


async def r13_weights_are_data(size: Size) -> Figures:
    """Run the fuzz of headers, offsets, configurations and index files."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", TEST),
        cwd=ROOT,
        env={**environment(), "FERRUM_FUZZ_ROUNDS": str(size.weight_files), "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return Figures(
        "R13",
        "Weight files are data",
        (exactly("exit status of the fuzz", process.returncode or 0, 0),),
        {"files": size.weight_files, "said": output.decode(errors="replace").splitlines()[-1:]},
    )

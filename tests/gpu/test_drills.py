"""Faults of a server on a CUDA device: what its callers and its operator see, and that nothing stays behind.

With ``FIRST_LIGHT_REHEARSAL=1`` they are rehearsed on a CPU.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from ferrum_rpc.client import ExecutorClient, Greedy, OutputSpec, Positions, Sample
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Span, SpanResult, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import ExecutorError, InvalidRequest, StepFailed
from tests.support.checkpoints import make_checkpoint
from tests.support.process import ROOT, environment, serving
from tests.support.waiting import until

REHEARSAL = "FIRST_LIGHT_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSAL else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (REHEARSAL or torch.cuda.is_available()), reason="needs a CUDA device"),
]
needs_cuda = pytest.mark.skipif(REHEARSAL, reason="needs the memory of a CUDA device")

SHAPE = {"vocab_size": 1000, "hidden_size": 256, "max_position_embeddings": 2048}
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 900, 700)]
LOAD = 16
END_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16, **SHAPE))


def device_bytes() -> int:
    """Free memory of the device, whoever has the rest."""
    return 0 if REHEARSAL else torch.cuda.mem_get_info()[0]


async def use(target: str) -> None:
    """A prompt, by a client of its own."""
    async with ExecutorClient(target) as client, client.sequence() as sequence:
        await sequence.prefill(TOKENS[:40], Greedy())


async def test_a_killed_engine_ends_its_server_and_gives_its_memory_back(folder):
    before, flags = device_bytes(), ("--device", DEVICE, "--engine", "process")
    async with serving(*flags, model=folder, fresh=True) as server, ExecutorClient(server.target) as client:
        sequence = client.sequence()
        await sequence.prefill(TOKENS[:40], Greedy())
        [engine] = server.children()
        os.kill(engine, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ExecutorError):
            while time.monotonic() < began + END_S:
                await sequence.decode(5, Greedy())
        assert await server.ended() == 1 and server.count("engine_failed") == 1
    await until(lambda: device_bytes() >= before - (64 << 20), END_S)
    async with serving(*flags, model=folder, fresh=True) as again:
        await use(again.target)


def test_a_cache_that_the_memory_does_not_hold_ends_the_start_with_the_option(folder):
    command = [sys.executable, "-m", "ferrum_rpc.cli", "serve", folder, "--device", DEVICE, "--log-format", "json"]
    command += ["--port", "0", "--kv-memory", "100TiB", "--max-sequences", "1000000000"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 1 and last["event"] == "startup_failed", done.stderr[-2000:]
    assert "--kv-memory" in json.dumps(last) and "Traceback" not in done.stderr


@needs_cuda
def test_a_step_without_memory_fails_alone(tmp_path):
    """The cache leaves 300 MiB: a full step does not fit, is undone, and smaller ones go on."""
    shape = {"vocab_size": 131_072, "hidden_size": 1024, "intermediate_size": 8192, "max_position_embeddings": 8192}
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **shape)
    settings = ModelSettings(str(path), device=DEVICE, dtype="bfloat16", max_sequences=1 << 20, kv_blocks=64)
    build_runner(settings).close()  # whatever is compiled, and the context, are there
    torch.cuda.empty_cache()
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    left = device_bytes() - weights - (300 << 20)
    runner = build_runner(
        ModelSettings(str(path), device=DEVICE, dtype="bfloat16", max_sequences=1 << 20, kv_memory=left)
    )
    drawn = OutputSpec(Positions.LAST, Sample(top_p=0.9, seed=1))
    full = [Span(s, np.full(32, 5, np.int32), 0, drawn, create=True) for s in range(256)]
    small = Span(300, np.full(32, 5, np.int32), 0, drawn, create=True)
    try:
        with runner.context():
            before = runner.kv.state()
            with pytest.raises(StepFailed):
                runner.forward(Step(tuple(full)))
            assert runner.kv.state() == before
            runner.check()
            [outcome] = runner.forward(Step((small,))).outcomes
        assert isinstance(outcome, SpanResult)
    finally:  # the next tests need a device with memory
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()


async def test_masks_that_do_not_fit_the_vocabulary_are_refused_and_steps_go_on(folder):
    flags = ("--device", DEVICE)
    async with serving(*flags, model=folder, fresh=True) as server, ExecutorClient(server.target) as client:
        vocabulary = SHAPE["vocab_size"]
        allowed = np.zeros(vocabulary, bool)
        allowed[vocabulary - 1] = True
        mask = await client.register_token_mask(allowed)
        for wrong in (np.ones(vocabulary + 64, bool), np.ones(3, bool)):
            with pytest.raises(InvalidRequest):
                await client.register_token_mask(wrong)
        async with client.sequence() as sequence:
            assert (await sequence.prefill(TOKENS[:40], Greedy(mask=mask))).token == vocabulary - 1
            with pytest.raises(ExecutorError):
                await sequence.decode(5, Greedy(mask=bytes(32)))
            assert (await sequence.decode(5, Sample(mask=mask, seed=1))).token == vocabulary - 1


async def test_sigterm_under_load_answers_what_runs_and_ends_with_status_0(folder):
    flags = ("--device", DEVICE, "--grace-s", "5")
    async with (
        serving(*flags, model=folder, fresh=True) as server,
        ExecutorClient(server.target, session=True) as client,
    ):
        answers, ends = 0, list[ExecutorError]()

        async def write(number: int) -> None:
            nonlocal answers
            sequence = client.sequence()
            try:
                token = (await sequence.prefill(TOKENS[: 20 + number], Sample(seed=number))).token
                while True:
                    token = (await sequence.decode(token, Sample(top_p=0.9, seed=number))).token
                    answers += 1
            except ExecutorError as error:
                ends.append(error)

        writing = [asyncio.create_task(write(number)) for number in range(LOAD)]
        await until(lambda: answers >= 10 * LOAD, END_S)
        server.signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            await asyncio.gather(*writing)
        assert len(ends) == LOAD and await server.ended() == 0
        assert server.count("engine_failed") == 0 and server.count("step_failed") == 0

"""`ferrum-rpc` as an operator types it, against an executor over a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from ferrum_rpc import ask, cli
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.core import ModelInfo
from ferrum_rpc.errors import DeviceLost, InstanceMismatch, InvalidRequest, PermissionDenied, Unauthenticated
from tests.support.commands import answer, run
from tests.support.serving import Served, serve_identity


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_identity(kv_blocks=64, block_size=4) as served:
        yield served


async def test_status_names_every_number_in_json_and_in_text(served, capsys) -> None:
    async with ExecutorClient(served.target) as client, client.sequence() as sequence:
        await sequence.prefill([1, 2, 3, 4, 5])
        status = await answer(capsys, served.target, "status")
        assert status["pressure"] == {
            "free_blocks": 62,
            "total_blocks": 64,
            "block_size": 4,
            "queued_items": 0,
            "queued_tokens": 0,
            "sequences": 1,
            "running_items": 0,
            "free_slots": 0,
            "total_slots": 0,
        }
        await run(served.target, "status")
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["free_blocks", "62"] in lines and ["sequences", "1"] in lines
    assert ["method", "calls", "errors", "items", "item_errors"] in lines
    assert any(line[:2] == ["ferrum_rpc.executor.v1.ModelExecutor/Prefill", "1"] for line in lines)


@pytest.mark.parametrize("width", [40, 200])
async def test_answers_fit_the_terminal(served, capsys, monkeypatch, width) -> None:
    monkeypatch.setattr(ask, "columns", lambda _: width)
    for command in ("info", "status"):
        await run(served.target, command)
        wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > width]
        assert all(len(line.split()) == 1 for line in wide), "no word is cut"


async def test_sequences_lists_them_and_reset_releases_them(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    async with ExecutorClient(served.target, client_name="a scheduler") as client:
        assert await answer(capsys, served.target, "sequences") == []
        await run(served.target, "sequences")
        assert capsys.readouterr().out == "none\n"
        await client.sequence().prefill([1, 2, 3, 4, 5])
        [found] = await answer(capsys, served.target, "sequences")
        assert (found["length"], found["blocks"], found["client_name"], found["busy"]) == (5, 2, "a scheduler", False)
        await run(served.target, "sequences")
        head, row = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["label", "length", "blocks"] and row.split()[1:3] == ["5", "2"]
        with pytest.raises(InstanceMismatch):
            await run(served.target, "reset", "--instance-id", "another")
        assert await answer(capsys, served.target, "reset") == {"released_sequences": 1}
        assert await answer(capsys, served.target, "sequences") == []


async def test_warmup_tells_its_steps_and_drain_its_state(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    report = await answer(capsys, served.target, "warmup", "--batch-size", "2", "--prefill-tokens", "4")
    assert report["steps"] == 2 and report["pressure"]["free_blocks"] == 64
    with pytest.raises(InvalidRequest):
        await run(served.target, "drain", "--grace-s", "-1")
    assert await answer(capsys, served.target, "drain", "--grace-s", "5") == {"state": "DRAINING"}
    await served.server.draining.done.wait()


@pytest.mark.parametrize("grace", ["0", "60"])
async def test_a_drain_that_is_waited_for_says_whether_the_server_has_ended(served, capsys, monkeypatch, grace) -> None:
    """A server that serves an owned sequence for a minute; and one that has ended."""
    monkeypatch.setattr(ask, "LOOK_EVERY_S", 0.001)

    async def end() -> None:
        await served.server.draining.done.wait()
        await served.server.stop(0)

    ending = asyncio.create_task(end())
    async with ExecutorClient(served.target) as client:
        await client.sequence().prefill([1, 2, 3])
        seconds = "60" if grace == "0" else "0.05"
        status = await run(served.target, "drain", "--json", "--grace-s", grace, "--wait", seconds)
    assert status == (0 if grace == "0" else 1)
    assert json.loads(capsys.readouterr().out) == {"state": "DRAINING", "ended": status == 0}
    ending.cancel()


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == cli.EXIT_USAGE
    listed = capsys.readouterr().err
    _, commands = cli.build_parser(settings=False)
    for name in commands:
        assert f"\n    {name}" in listed


@pytest.mark.parametrize(
    ("error", "says"), [(Unauthenticated("no"), "--token-file"), (PermissionDenied("no"), ""), (DeviceLost("no"), "")]
)
def test_who_shows_no_token_is_told_how(error, says, monkeypatch, capsys) -> None:
    async def refuse(_: Any) -> int:
        raise error

    monkeypatch.setattr(ask, "status", refuse)
    monkeypatch.setattr(cli, "prepare", lambda: None)  # the environment of this process is not ours
    with pytest.raises(SystemExit) as caught:
        cli.main(["status"])
    assert caught.value.code == cli.EXIT_FAILED
    told = capsys.readouterr().err
    assert ("--token-file" in told) is bool(says) and str(error.reason) in told


def test_where_nobody_answers_one_line_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "prepare", lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["health", "--target", "127.0.0.1:1", "--timeout", "2", "--json"])
    assert caught.value.code == cli.EXIT_FAILED
    told = capsys.readouterr()
    assert told.err.startswith("ferrum-rpc health: TRANSPORT: cannot reach an executor at 127.0.0.1:1: ")
    assert len(told.err.splitlines()) == 1 and len(told.err) < 160, "gRPC's chain of reasons is left out"
    assert not told.out


def model(name: str = "mine", vocab_size: int = 1000, folder: str = "") -> ModelInfo:
    return ModelInfo(name, "Some", vocab_size, 64, 1, 8, 1, 1, 8, 1, "float32", "float32", 64, folder=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of three words."""
    tokenizer = Tokenizer(WordLevel({"alpha": 0, "beta": 1, "gamma": 2}, unk_token="alpha"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_generate_reads_the_tokenizer_of_the_model_or_the_one_that_is_named(folder: Path) -> None:
    for text in (
        ask.TextCodec(None, model(folder=str(folder))),
        ask.TextCodec(folder, model()),
        ask.TextCodec(folder / "tokenizer.json", model()),
    ):
        assert text.encode("beta gamma") == [1, 2]
        assert text.decode([2, 1]) == "gamma beta"


@pytest.mark.parametrize("name", ask.BYTE_MODELS)
def test_the_built_in_models_speak_bytes(name: str) -> None:
    text = ask.TextCodec(None, model(name, 264))
    assert text.encode("é") == [0xC3, 0xA9]
    assert text.decode([0xC3, 0xA9, 263]) == "é"


def test_generate_refuses_a_model_whose_tokenizer_is_not_here(tmp_path: Path) -> None:
    for elsewhere in (model("mine"), model("demo", folder="/not/on/this/machine/demo")):
        with pytest.raises(InvalidRequest, match="--tokenizer"):
            ask.TextCodec(None, elsewhere)
    with pytest.raises(InvalidRequest, match=f"no tokenizer at {tmp_path}/tokenizer.json"):
        ask.TextCodec(tmp_path, model())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="is not a valid tokenizer"):
        ask.TextCodec(tmp_path, model())


def test_generate_refuses_a_tokenizer_of_another_vocabulary(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"another vocabulary.*3 tokens, mine 2"):
        ask.TextCodec(folder, model(vocab_size=2))
    with pytest.raises(InvalidRequest, match=r"another vocabulary.*no token 7"):
        ask.TextCodec(folder, model()).decode([1, 7])


async def test_generate_completes_with_the_models_own_bytes(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(served.target, "generate", "abc", "--max-new-tokens", "5") == 0
    assert capsys.readouterr().out.endswith("\n")

"""`ferrum-rpc info|status|health|generate`, and for operators `sequences|adapters|drain|reset|warmup`: a client of a
running server, for a person or a script."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import enum
import json
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ferrum_rpc.client import LIVENESS, ExecutorClient, ExecutorState, Health, read_token, tls
from ferrum_rpc.core import ModelInfo
from ferrum_rpc.errors import Draining, InvalidRequest, TransportError
from ferrum_rpc.terminal import columns, hanging, table

LOOK_EVERY_S = 0.2

BYTE_MODELS = ("demo", "demo-draft", "identity")
"""The built-in models: ids below `BYTE_TOKENS` are bytes, and no tokenizer is needed."""
BYTE_TOKENS = 256
TOKENIZER = "tokenizer.json"


async def info(arguments: argparse.Namespace) -> int:
    """Print the model, device and limits of the server."""
    async with connect(arguments) as client:
        _show(await client.info(), as_json=arguments.json)
    return 0


async def status(arguments: argparse.Namespace) -> int:
    """Print the state, load and counters of the server."""
    async with connect(arguments) as client:
        _show(await client.status(), as_json=arguments.json)
    return 0


async def health(arguments: argparse.Namespace) -> int:
    """Exit status 0 if it serves, else 1, for scripts and container health checks. With ``live`` only process and
    device count, whether or not it accepts new sequences."""
    async with connect(arguments) as client:
        state = await client.health(LIVENESS if arguments.live else "")
    if arguments.json:
        _show({"status": state}, as_json=True)
    else:
        print(state.name)
    return 0 if state is Health.SERVING else 1


async def sequences(arguments: argparse.Namespace) -> int:
    """List the live sequences of every caller."""
    async with connect(arguments) as client:
        _show(await client.list_sequences(), as_json=arguments.json)
    return 0


async def adapters(arguments: argparse.Namespace) -> int:
    """Load and unload adapters, then list the loaded ones."""
    async with connect(arguments) as client:
        for name in arguments.unload:
            await client.unload_adapter(name)
        for name in arguments.load:
            await client.load_adapter(name)
        _show(await client.list_adapters(), as_json=arguments.json)
    return 0


async def drain(arguments: argparse.Namespace) -> int:
    """Make it refuse new sequences, and end when the owned ones are gone. With ``wait``, exit status 1 if it has not
    ended after so many seconds."""
    async with connect(arguments) as client:
        answer: dict[str, Any] = {"state": await client.drain(arguments.grace_s)}
        if arguments.wait is not None:
            answer["ended"] = await _ended(client, arguments.wait)
    _show(answer, as_json=arguments.json)
    return 0 if answer.get("ended", True) else 1


async def reset(arguments: argparse.Namespace) -> int:
    """Release every sequence of every caller."""
    async with connect(arguments) as client:
        released = await client.reset(instance_id=arguments.instance_id)
    _show({"released_sequences": released}, as_json=arguments.json)
    return 0


async def warmup(arguments: argparse.Namespace) -> int:
    """Run steps of typical shapes."""
    async with connect(arguments) as client:
        _show(await client.warmup(arguments.batch_size, arguments.prefill_tokens), as_json=arguments.json)
    return 0


async def generate(arguments: argparse.Namespace) -> int:
    """Complete a prompt greedily; the text is printed as it arrives."""
    async with connect(arguments) as client:
        facts = await client.info()
        tokenizer = TextCodec(arguments.tokenizer, facts.model)
        prompt = tokenizer.encode(arguments.prompt)
        if not prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        async with client.sequence() as sequence:
            generated: list[int] = []
            shown = ""
            async for token in sequence.generate(prompt, max_tokens=arguments.max_new_tokens):
                generated.append(token)
                text = tokenizer.decode(generated)
                if not text.endswith("\ufffd"):  # a character whose bytes have not all come
                    sys.stdout.write(text[len(shown) :])
                    sys.stdout.flush()
                    shown = text
        sys.stdout.write("\n")
    return 0


async def _ended(client: ExecutorClient, seconds: float) -> bool:
    """Whether a draining server has ended within so many seconds, or has been replaced."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if (await client.status()).state not in {ExecutorState.DRAINING, ExecutorState.HUNG}:
                    return True
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        return False
    except (Draining, TransportError):  # it has ended
        return True


async def until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Whether Ctrl-C or SIGTERM ended it. A second one ends the program, as if the first had not been handled."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    signals = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for each in signals:
            loop.remove_signal_handler(each)

    def interrupt() -> None:
        restore()
        task.cancel()

    for each in signals:
        loop.add_signal_handler(each, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        restore()
    return False


def connect(arguments: argparse.Namespace, target: str = "", **options: Any) -> ExecutorClient:
    """A client of ``target``, or the command line's, with the credentials of the command line, and its own
    ``options``."""
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    return ExecutorClient(
        target or arguments.target,
        timeout_s=arguments.timeout,
        credentials=tls(*files) if arguments.tls or any(files) else None,
        token=arguments.token if arguments.token_file is None else read_token(arguments.token_file),
        **options,
    )


class TextCodec:
    """Text to ids and back: a tokenizer's, or bytes. ``path``: a tokenizer.json or its folder; None: the model's."""

    def __init__(self, path: Path | None, model: ModelInfo) -> None:
        self._tokenizer: Any = None
        if path is None and not model.folder and model.name in BYTE_MODELS:
            return
        how = f"name the folder of {model.name}, or its {TOKENIZER}, with --tokenizer"
        if path is None and not model.folder:
            raise InvalidRequest(f"this executor does not report where its model is: {how}", field="tokenizer")
        path = Path(model.folder) if path is None else path.absolute()
        file = path / TOKENIZER if path.is_dir() else path
        if not file.is_file():
            raise InvalidRequest(f"no tokenizer at {file}: {how}", field="tokenizer")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise InvalidRequest(f"{file} is not a valid tokenizer: {error}", field="tokenizer") from None
        self._file = file
        size = self._tokenizer.get_vocab_size()
        if size > model.vocab_size:
            raise self._foreign(f"it has {size} tokens, {model.name} {model.vocab_size}")

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(text.encode()) if self._tokenizer is None else list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, of which the last is new."""
        if self._tokenizer is None:
            return bytes(token for token in ids if token < BYTE_TOKENS).decode(errors="replace")
        if self._tokenizer.id_to_token(ids[-1]) is None:
            raise self._foreign(f"it has no token {ids[-1]}, which the model chose")
        return str(self._tokenizer.decode(ids))

    def _foreign(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self._file} is of another vocabulary than the model's: {why}", field="tokenizer")


def _plain(value: Any) -> Any:
    """Dataclasses, named tuples, enums and bytes as JSON's types: every number keeps its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    return value


def _show(value: Any, *, as_json: bool) -> None:
    plain = _plain(value)
    width = columns(sys.stdout)
    if as_json:
        print(json.dumps(plain))
    elif isinstance(plain, dict):
        print("\n".join(_lines(plain, width)))
    else:
        print("\n".join(_table(plain, width)) if plain else "none")


def _lines(value: dict[str, Any], width: int | None, indent: str = "") -> list[str]:
    """Nested facts, one per line; wrapped if there is a ``width``."""
    lines = []
    deeper = f"{indent}  "
    for name, each in value.items():
        if isinstance(each, dict):
            lines += [f"{indent}{name}", *_lines(each, width, deeper)]
        elif isinstance(each, list) and each and isinstance(each[0], dict):
            lines += [f"{indent}{name}", *_table(each, width, deeper)]
        elif isinstance(each, list) and each and isinstance(each[0], list):
            pairs = (hanging(f"{deeper}{what}: ", ", ".join(map(str, rest)), width) for what, *rest in each)
            lines += [f"{indent}{name}", *(line for pair in pairs for line in pair)]
        else:
            lines += hanging(f"{indent}{name:<28} ", _cell(each), width)
    return lines


def _table(rows: list[dict[str, Any]], width: int | None, indent: str = "") -> list[str]:
    """Facts of many alike, one of them a line below their names; where that is wider than ``width``, each by itself."""
    lines = table([list(rows[0]), *([_cell(each) for each in row.values()] for row in rows)])
    if width is not None and len(indent) + max(map(len, lines)) > width:
        return [line for row in rows for line in ("", *_lines(row, width, indent))][1:]
    return [f"{indent}{line}" for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)

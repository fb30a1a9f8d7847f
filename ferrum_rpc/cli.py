"""`ferrum-rpc`: serve a model, plan for it, and ask or measure a running server.

The parser is built from the settings model, so that a flag, its variable and its entry in a file are one thing. What a
subcommand needs is imported when it runs: `--help` loads neither torch nor grpc, and where only the client is installed
every command but `serve`, `plan` and `doctor` works.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ferrum_rpc import __version__
from ferrum_rpc.fleet.options import OWN_SETTINGS, add_fleet_flags
from ferrum_rpc.fronts.options import add_worker_flags
from ferrum_rpc.install import install
from ferrum_rpc.runtime import prepare
from ferrum_rpc.usage import TOKEN_VARIABLE, ConfigError, hint

if TYPE_CHECKING:
    from ferrum_rpc.config import ServeSettings

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MIN_INTERVAL_S = 0.1
"""Of `top`, which requests the status of every server twice in it."""

EXTRAS = {"ray": "ray", "rich": "scheduler", "smg_grpc_proto": "smg"}
"""The smallest extras with packages that commands other than `serve` need; of any other package it is `server`."""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a wrong flag or command with the nearest right one."""

    def error(self, message: str) -> NoReturn:
        """Name the nearest flag."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")

    def flags(self) -> list[str]:
        """Every flag that this parser knows."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def build_parser(*, settings: bool = True) -> tuple[Parser, dict[str, Parser]]:
    """The parser and its subcommands by name. Without ``settings``, `serve` lacks the flags that come from the settings
    model, which is then not loaded."""
    from ferrum_rpc.bench.options import add_flags

    parser = Parser(prog="ferrum-rpc", description="A model's forward pass over gRPC.")
    parser.add_argument("--version", action="version", version=f"ferrum-rpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    named: dict[str, Parser] = {}
    for name, text, own in (
        ("serve", "serve a model", ""),
        ("plan", "check whether a model fits the memory; takes the settings of `serve`", " [--memory BYTES] [--json]"),
        (
            "doctor",
            "check whether a model can be served here, and is computed correctly; takes the settings of `serve`",
            " [--json]",
        ),
    ):
        usage = f"ferrum-rpc {name} [-h] [--config CONFIG]{own} [--SETTING VALUE ...] model"
        command = named[name] = commands.add_parser(name, help=text, allow_abbrev=False, usage=usage)
        built_in = "`demo`, `demo-draft`, `identity`"
        command.add_argument(
            "model", help=f"a Hugging Face folder or name, a GGUF file, or a built-in model: {built_in}"
        )
        command.add_argument("--config", type=Path, help="TOML file of settings (default: $FERRUM_CONFIG)")
        if settings:
            _add_settings(command)
    named["rank"] = commands.add_parser(
        "rank",
        help="run another rank of a model; set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        allow_abbrev=False,
    )
    named["rank"].add_argument("--trust-rank-network", action="store_true", help="as `serve` has it")
    named["plan"].add_argument(
        "--memory", metavar="BYTES", help="memory to plan for, e.g. 80GiB (default: what is free here)"
    )
    for name, text in (
        ("info", "show the model, device and limits of a running server"),
        ("status", "show the state, load and counters of a running server"),
        ("health", "exit 0 if a running server serves"),
        ("sequences", "for operators: list the live sequences of every caller"),
        ("adapters", "for operators: list, load and unload adapters"),
        ("drain", "for operators: refuse new sequences, end when the owned ones are gone, like SIGTERM"),
        ("reset", "for operators: release every sequence of every caller"),
        ("warmup", "for operators: run steps of typical shapes"),
        ("generate", "complete a prompt greedily on a running server"),
        ("bench", "measure a running server as a remote scheduler"),
        ("top", "watch the state, load and rates of several servers"),
        ("worker", "serve the texts of servers to an existing router, for OpenAI clients"),
    ):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if name not in ("top", "worker"):
            command.add_argument("--target", default="127.0.0.1:50051", help="host:port of the server, or unix:PATH")
        command.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for an answer")
        command.add_argument("--tls", action="store_true", help="use TLS; implied by the next three flags")
        command.add_argument("--tls-ca", type=Path, help="PEM file of trusted authorities (default: the public ones)")
        command.add_argument("--tls-cert", type=Path, help="PEM file of the client certificate, for mutual TLS")
        command.add_argument("--tls-key", type=Path, help="PEM file of the client certificate's key")
        command.add_argument("--token-file", type=Path, help=f"file with a token (default: ${TOKEN_VARIABLE})")
        named[name] = command
    named["top"].add_argument(
        "--target",
        action="append",
        help="as for the others, or dns:///name:port for each server of a name, or file:PATH for each line of a file; "
        "may be repeated",
    )
    named["top"].add_argument("--once", action="store_true", help="write one table, or one JSON document, and end")
    named["top"].add_argument("--interval-s", type=_interval, default=1.0, help="seconds that rates cover (default: 1)")
    named["top"].set_defaults(timeout=2.0)  # until a server that does not answer is shown so
    add_worker_flags(named["worker"])
    named["worker"].set_defaults(timeout=60.0)
    for name in (
        "plan",
        "doctor",
        "info",
        "status",
        "health",
        "sequences",
        "adapters",
        "drain",
        "reset",
        "warmup",
        "top",
    ):
        named[name].add_argument("--json", action="store_true", help="JSON on one line, for programs")
    named["health"].add_argument(
        "--live", action="store_true", help="check only process and device: also 0 while the server loads or drains"
    )
    named["drain"].add_argument(
        "--grace-s", type=float, help="seconds for which owned sequences are served (default: the server's)"
    )
    named["drain"].add_argument(
        "--wait", type=float, metavar="SECONDS", help="wait for the end; exit status 1 if it has not come by then"
    )
    named["reset"].add_argument(
        "--instance-id", default="", help="only this instance of the server (`info` shows it), not a restarted one"
    )
    for flag, text in (("--load", "load this adapter first"), ("--unload", "unload this adapter first, if unused")):
        named["adapters"].add_argument(flag, action="append", default=[], metavar="NAME", help=text)
    named["warmup"].add_argument("--batch-size", type=int, default=0, help="sequences decoded together (default: 8)")
    named["warmup"].add_argument("--prefill-tokens", type=int, default=0, help="tokens of the prompt (default: 128)")
    add_flags(named["bench"])
    named["fleet"] = commands.add_parser("fleet", help="run executors on a Ray cluster", allow_abbrev=False)
    add_fleet_flags(named["fleet"])
    named["generate"].add_argument("prompt", help="the text to complete")
    named["generate"].add_argument(
        "--max-new-tokens", type=int, default=64, help="maximum number of tokens to generate"
    )
    named["generate"].add_argument(
        "--tokenizer", type=Path, help="tokenizer.json, or its folder (default: the model's)"
    )
    return parser, named


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_INTERVAL_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds of at least {MIN_INTERVAL_S}, not {text!r}")
    return seconds


def _add_settings(command: Parser) -> None:
    from ferrum_rpc.config import GROUPS, SETTINGS

    group: argparse._ActionsContainer = command
    for name, field in SETTINGS.items():
        if name in GROUPS:
            group = command.add_argument_group(GROUPS[name])
        _add_setting(group, name, field)


def _add_setting(parser: argparse._ActionsContainer, name: str, field: Any) -> None:
    flag = "--" + name.replace("_", "-")
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": field.description}
    if field.default not in (None, ""):
        options["help"] += f" (default: {field.default})"
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        return
    if typing.get_origin(field.annotation) is typing.Literal:
        options["choices"] = typing.get_args(field.annotation)
    else:
        options["metavar"] = name.rsplit("_", 1)[-1].upper()
    parser.add_argument(flag, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits 0, 1 (it failed) or 2 (it was written wrongly, or what was planned does not fit)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _command(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "ferrum_rpc":
            raise
        sys.exit(f"ferrum-rpc: this needs {package}, which is not installed: {install(EXTRAS.get(package, 'server'))}")
    except KeyboardInterrupt:  # also while the settings are imported
        sys.exit(EXIT_INTERRUPTED)


def _command(arguments: list[str]) -> NoReturn:
    serves = arguments[:1] in (["serve"], ["plan"], ["doctor"]) or arguments[:2] == ["fleet", "up"]
    parser, commands = build_parser(settings=serves)
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(EXIT_USAGE)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        parser.error(f"unknown command {arguments[0]!r}{hint(arguments[0], commands)}")
    parsed, unknown = parser.parse_known_args(arguments)
    command = getattr(parsed, "parser", commands[parsed.command])
    known = command.flags()
    if (parsed.command, getattr(parsed, "action", None)) == ("fleet", "up"):
        parsed.arguments = unknown
        parsed.serve, unknown = parser.parse_known_args(["serve", *unknown])
        known += commands["serve"].flags()
    if unknown:
        command.error(f"unknown flag {unknown[0]!r}{hint(unknown[0].split('=')[0], known)}")
    try:
        prepare()
        status = _run(parsed)
        sys.stdout.flush()
    except ConfigError as error:
        command.error(str(error))
    except BrokenPipeError:
        # The reader of the output has what it wanted. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    sys.exit(status)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command in ("serve", "plan", "doctor"):
        return _with_settings(parsed)
    if parsed.command == "fleet":
        return _fleet(parsed)
    if parsed.command == "rank":
        return _follow(trusted=parsed.trust_rank_network)
    parsed.token = os.environ.get(TOKEN_VARIABLE)  # never a flag: `ps` shows those to every user
    if parsed.command == "worker":
        return _work(parsed)
    from ferrum_rpc import ask
    from ferrum_rpc.bench.program import bench
    from ferrum_rpc.client.encryption import explained
    from ferrum_rpc.errors import ExecutorError, Unauthenticated
    from ferrum_rpc.top.program import top

    command = {"bench": bench, "top": top}.get(parsed.command) or getattr(ask, parsed.command)
    try:
        status: int = asyncio.run(command(parsed))
        return status
    except ExecutorError as error:
        print(f"ferrum-rpc {parsed.command}: {error.reason}: {explained(error, parsed.target)}", file=sys.stderr)
        if isinstance(error, Unauthenticated):
            print(f"name a file with a token: --token-file FILE, or set ${TOKEN_VARIABLE}", file=sys.stderr)
        return EXIT_FAILED


def _work(parsed: argparse.Namespace) -> int:
    from ferrum_rpc.fronts.program import worker
    from ferrum_rpc.runtime import choose_loop

    with asyncio.Runner(loop_factory=choose_loop("auto").make) as runner:
        return runner.run(worker(parsed))


def _fleet(parsed: argparse.Namespace) -> int:
    if parsed.action == "up":
        for name in OWN_SETTINGS:
            if name in parsed.serve:
                raise ConfigError(
                    f"{name} must not be set: a fleet uses the node's address, a free port there, and json"
                )
        parsed.ranks = _settings(parsed.serve).model.ranks  # what is wrong is said here, and not by each executor
    from ferrum_rpc.fleet import cluster

    command: Callable[[argparse.Namespace], int] = getattr(cluster, parsed.action)
    return command(parsed)


def _follow(*, trusted: bool) -> int:
    from ferrum_rpc.errors import ExecutorError
    from ferrum_rpc.rank import follow

    try:
        return follow(trusted=trusted)
    except (ExecutorError, OSError, RuntimeError) as error:
        print(f"ferrum-rpc rank: {error}", file=sys.stderr)
        return EXIT_FAILED


def _settings(parsed: argparse.Namespace) -> ServeSettings:
    from ferrum_rpc.config import SETTINGS, load_settings

    flags = {name: value for name, value in vars(parsed).items() if name in SETTINGS}
    return load_settings(parsed.model, flags, parsed.config)


def _with_settings(parsed: argparse.Namespace) -> int:
    from ferrum_rpc.config import read_bytes

    settings = _settings(parsed)
    if parsed.command == "serve" and settings.model.ranks > 1 and os.environ.get("RANK", "0") != "0":
        return _follow(trusted=settings.model.trust_rank_network)  # who starts ranks, starts all with one command
    if parsed.command == "serve":
        from ferrum_rpc.serve import serve

        return serve(settings)
    from ferrum_rpc.doctor import doctor
    from ferrum_rpc.errors import ExecutorError
    from ferrum_rpc.plan import plan

    try:
        if parsed.command == "doctor":
            return doctor(settings, as_json=parsed.json)
        memory = None if parsed.memory is None else read_bytes("memory", parsed.memory)
        return plan(settings, memory, as_json=parsed.json)
    except ExecutorError as error:
        print(f"ferrum-rpc {parsed.command}: {error.reason}: {error.message}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    main()

"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.client import ChannelCredentials, Greedy, InvalidRequest, Sample, read_token, tls


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    targets: Sequence[str]
    prefill_targets: Sequence[str]
    prompts: tuple[str, ...]
    max_new_tokens: int
    token_budget: int
    max_running: int
    sampling: Greedy | Sample
    tokenizer: Path | None
    token: str | None
    credentials: ChannelCredentials | None
    session: bool
    run_tokens: int
    bypass: bool
    plain: bool
    texts: Path | None
    speculate: str
    draft: str | None
    patience_s: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line; exits with status 2 and a message where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m clients.scheduler",
        description="Serve prompts on a remote executor: continuous batching, chunked prefill, preemption, sampling.",
    )
    parser.add_argument(
        "--target",
        dest="targets",
        action="append",
        metavar="TARGET",
        help="host:port or unix:path (localhost:50051); repeated, or dns:///name:port or file:PATH, for several",
    )
    parser.add_argument(
        "--prefill-target",
        dest="prefill_targets",
        action="append",
        default=[],
        metavar="TARGET",
        help="compute prompts on that executor, or those, and move them to --target",
    )
    parser.add_argument("--token", help="a bearer token, where the executor asks for one")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a file with it: `ps` shows a --token to everybody"
    )
    parser.add_argument("--tls", action="store_true", help="TLS; on when one of the next three is given")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="whom to trust, PEM (the public authorities)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="the certificate to show, PEM, for mutual TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    source.add_argument("--prompts-file", type=Path, metavar="FILE", help="a prompt per line")
    source.add_argument("--demo", action="store_true", help="eight built-in prompts (the default)")
    parser.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="per prompt (%(default)s)")
    parser.add_argument(
        "--token-budget",
        type=_positive,
        default=256,
        metavar="N",
        help="tokens a step (%(default)s): longer prompts go in pieces, cut by what else is in the step",
    )
    parser.add_argument("--max-running", type=_positive, default=16, metavar="N", help="prompts at once (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0 keeps all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="1 keeps all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--greedy", action="store_true", help="the executor picks the best token")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or its folder; without: a token is a byte"
    )
    parser.add_argument(
        "--unary", dest="session", action="store_false", help="a call for each request, rather than one session"
    )
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--speculate", choices=["lookup"], default="", help="guess what follows from the text itself, and verify it"
    )
    drafts.add_argument("--draft", metavar="TARGET", help="guess by an executor of a smaller model, and verify it")
    parser.add_argument(
        "--run-tokens", type=int, default=16, metavar="N", help="tokens a trip, at most; 0: single steps (%(default)s)"
    )
    parser.add_argument(
        "--bypass",
        action="store_true",
        help="use no prefix cache: what is computed again in the same pieces is exact",
    )
    parser.add_argument("--plain", action="store_true", help="no panels, only lines")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="write the texts there too, a JSON object a line")
    parser.add_argument(
        "--patience",
        dest="patience_s",
        type=float,
        default=30.0,
        metavar="S",
        help="give up after S s without progress",
    )
    given = parser.parse_args(arguments)
    if given.temperature < 0 or given.top_k < 0 or not 0 < given.top_p <= 1 or min(given.seed, given.run_tokens) < 0:
        parser.error("temperature >= 0, top-k >= 0, 0 < top-p <= 1, seed >= 0 and run-tokens >= 0 are needed")
    greedy = given.greedy or given.temperature == 0
    given.sampling = Greedy() if greedy else Sample(given.temperature, given.top_k, given.top_p, seed=given.seed)
    files = (given.tls_ca, given.tls_cert, given.tls_key)
    try:
        given.credentials = tls(*files) if given.tls or any(files) else None
        given.token = given.token if given.token_file is None else read_token(given.token_file)
    except InvalidRequest as error:
        parser.error(error.message)
    given.targets = given.targets or ["localhost:50051"]
    given.prompts = _prompts(parser, given)
    return Options(**{each.name: getattr(given, each.name) for each in fields(Options)})


def _prompts(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, ...]:
    prompts = tuple(given.prompt or DEMO_PROMPTS)
    if given.prompts_file is not None:
        try:
            prompts = tuple(line for line in given.prompts_file.read_text("utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"cannot read {given.prompts_file}: {error}")
        if not prompts:
            parser.error(f"{given.prompts_file} holds no prompts")
    if not all(prompts):
        parser.error("a prompt is empty")
    return prompts


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number

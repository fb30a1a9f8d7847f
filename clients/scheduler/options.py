"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.client import ChannelCredentials, Greedy, InvalidRequest, Sample, read_token, tls


class Options(argparse.Namespace):
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
        help="host:port or unix:PATH (localhost:50051); for several repeat it, or give dns:///name:port or file:PATH",
    )
    parser.add_argument(
        "--prefill-target",
        dest="prefill_targets",
        action="append",
        default=[],
        metavar="TARGET",
        help="prefill on these executors, then move the caches to --target",
    )
    parser.add_argument("--token", help="bearer token, if the executor requires one")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token; `ps` shows a --token to every user"
    )
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by the next three flags")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="PEM file of trusted authorities (the public ones)")
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM file of the client certificate, for mutual TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file of the certificate's key")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="prompt; may be repeated")
    source.add_argument("--prompts-file", type=Path, metavar="FILE", help="file of prompts, one per line")
    source.add_argument("--demo", action="store_true", help="eight built-in prompts (the default)")
    parser.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="per prompt (%(default)s)")
    parser.add_argument(
        "--token-budget",
        type=_positive,
        default=256,
        metavar="N",
        help="maximum tokens per step (%(default)s); longer prompts are fed in chunks",
    )
    parser.add_argument(
        "--max-running", type=_positive, default=16, metavar="N", help="maximum prompts at once (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0 keeps all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="1 keeps all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--greedy", action="store_true", help="the executor picks the best token")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its folder (default: a token is a byte)"
    )
    parser.add_argument(
        "--unary", dest="session", action="store_false", help="make unary calls instead of using one session"
    )
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--speculate", choices=["lookup"], default="", help="draft tokens from the text itself, and verify them"
    )
    drafts.add_argument(
        "--draft", metavar="TARGET", help="draft tokens with an executor of a smaller model, and verify them"
    )
    parser.add_argument(
        "--run-tokens", type=int, default=16, metavar="N", help="maximum tokens per run; 0: single steps (%(default)s)"
    )
    parser.add_argument(
        "--bypass",
        action="store_true",
        help="bypass the prefix cache, so that recomputing in the same chunks is exact",
    )
    parser.add_argument("--plain", action="store_true", help="print lines instead of panels")
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help="also write the texts to this file, a JSON object per line"
    )
    parser.add_argument(
        "--patience",
        dest="patience_s",
        type=float,
        default=30.0,
        metavar="S",
        help="give up after S s without progress",
    )
    given = parser.parse_args(arguments, Options())
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
    return given


def _prompts(parser: argparse.ArgumentParser, given: Options) -> tuple[str, ...]:
    prompts = tuple(given.prompt or DEMO_PROMPTS)
    if given.prompts_file is not None:
        try:
            prompts = tuple(line for line in given.prompts_file.read_text("utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"cannot read {given.prompts_file}: {error}")
        if not prompts:
            parser.error(f"{given.prompts_file} has no prompts")
    if not all(prompts):
        parser.error("a prompt is empty")
    return prompts


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number

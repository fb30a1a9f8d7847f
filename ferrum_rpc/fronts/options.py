"""The flags of `ferrum-rpc worker`. Loads no package of the worker: `--help` comes here too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

DEFAULT_TARGET: Final = "127.0.0.1:50051"
DEFAULT_PORT: Final = 50061


def add_worker_flags(worker: argparse.ArgumentParser) -> None:
    """The flags besides those of the connection to the executors."""
    worker.add_argument("protocol", choices=["smg"], help="the protocol: smg's vllm_engine")
    worker.add_argument(
        "--target",
        action="append",
        help=f"an executor, host:port or unix:PATH (default: {DEFAULT_TARGET}), or dns:///name:port for each executor "
        "of a name, or file:PATH for each line of a file; may be repeated",
    )
    worker.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    worker.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on, 0: a free one (default: {DEFAULT_PORT})",
    )
    worker.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with the model's tokenizer.json (default: the executor's)"
    )
    worker.add_argument("--served-model-name", default="", help="name of the model (default: the executor's)")
    texts = worker.add_argument_group("texts")
    texts.add_argument("--token-budget", type=_count, default=512, help="prompt tokens of a step (default: 512)")
    texts.add_argument("--max-running", type=_count, default=256, help="texts at once at an executor (default: 256)")
    texts.add_argument("--max-waiting", type=_count, default=4096, help="texts that may wait (default: 4096)")
    texts.add_argument("--run-tokens", type=int, default=32, help="tokens per round trip; 0: single ones (default: 32)")
    texts.add_argument("--max-delay-s", type=float, help="longest time that a token waits for the rest of its run")
    texts.add_argument("--speculate", choices=["lookup"], help="draft tokens from the text itself, and verify them")
    texts.add_argument(
        "--patience-s", type=float, default=30.0, help="seconds without an executor until texts fail (default: 30)"
    )
    texts.add_argument("--grace-s", type=float, default=30.0, help="seconds for texts when it ends (default: 30)")
    port = worker.add_argument_group("the port")
    port.add_argument("--serve-tls-cert", type=Path, metavar="FILE", help="PEM file of the worker's certificate chain")
    port.add_argument("--serve-tls-key", type=Path, metavar="FILE", help="PEM file of its key")
    port.add_argument("--serve-tls-client-ca", type=Path, metavar="FILE", help="authorities of callers' certificates")
    port.add_argument("--serve-tokens", type=Path, metavar="FILE", help="file of callers' tokens, `name token` a line")
    port.add_argument("--insecure", action="store_true", help="listen beyond this machine without TLS or tokens")
    port.add_argument(
        "--serve-keepalive-time-s",
        type=float,
        default=30.0,
        help="seconds of silence after which a caller is pinged (default: 30)",
    )
    port.add_argument(
        "--serve-keepalive-timeout-s",
        type=float,
        default=10.0,
        help="seconds for its answer, after which its connection is closed and its texts end (default: 10)",
    )
    watch = worker.add_argument_group("logs and metrics")
    watch.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port; 0 picks a free one")
    watch.add_argument("--metrics-host", default="127.0.0.1", help="address of the metrics (default: 127.0.0.1)")
    watch.add_argument("--log-format", choices=["auto", "console", "json"], default="auto", help="(default: auto)")
    watch.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text!r}")
    return int(text)

"""The program of an engine process; only `ferrum-rpc serve` starts it.

It logs to the server's log. It has its own copy of the server's failpoints, and reports how often each has fired.
"""

from __future__ import annotations

import gc
import sys

from ferrum_rpc.building import build
from ferrum_rpc.config import ServeSettings
from ferrum_rpc.engine.api import Runner
from ferrum_rpc.engine.process.child import work
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.runtime import keep_freed_memory


def main() -> int:
    """Serve until the server asks to stop, or has ended."""
    fired: dict[str, int] = {}

    def made(settings: ServeSettings) -> Runner:
        nonlocal fired
        configure_logging(settings.log_format, settings.log_level)
        keep_freed_memory()
        failpoints = Failpoints(parse_failpoints(settings.failpoints), settings.failpoint_seed)
        fired = failpoints.fired
        runner = build(settings.model, failpoints, (settings.max_batch_tokens, settings.max_batch_items))
        gc.collect()
        gc.freeze()  # the model and its libraries are here to stay: no collection need look at them again
        return runner

    return work(made, sys.argv[1:], lambda: {name: count for name, count in fired.items() if count} or None)


if __name__ == "__main__":
    sys.exit(main())

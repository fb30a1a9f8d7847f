"""`make demo`: an executor with the demo model, and the reference scheduler against it, as two processes over gRPC.

What a newcomer would type in two terminals, in one. Both programs are started as a user starts them; this script knows
neither's insides. The executor is stopped with SIGTERM and must end with status 0.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve", "demo", "--port", "0", "--log-format", "json")


def wait_until_serving(executor: subprocess.Popen[str]) -> str:
    """The target of the executor, once it serves; shows what it chose on the way."""
    assert executor.stderr is not None
    target = ""
    for line in executor.stderr:
        try:
            event = json.loads(line)
        except ValueError:
            sys.stderr.write(line)
            continue
        match event["event"]:
            case "serving":
                target = event["target"]
                print(f"executor: {event['model']} ({event['parameters']:,} parameters) on {target}", flush=True)
            case "chosen":
                print(f"executor: {event['choice']:<28} {event['reason']}", flush=True)
            case "ready":
                return target
            case "cannot_serve":
                sys.exit(f"executor: {event['error']}")
    sys.exit("the executor ended before it served")


def main() -> None:
    """Start, run, stop."""
    with subprocess.Popen(SERVE, cwd=ROOT, stderr=subprocess.PIPE, text=True) as executor:
        try:
            target = wait_until_serving(executor)
            rest = executor.stderr
            assert rest is not None
            threading.Thread(target=rest.read, daemon=True).start()  # a full pipe would stop the executor
            scheduler = (sys.executable, "-m", "clients.scheduler", "--target", target, "--demo", *sys.argv[1:])
            status = subprocess.run(scheduler, cwd=ROOT, check=False).returncode
        finally:
            executor.send_signal(signal.SIGTERM)
            stopped = executor.wait(60)
    print(f"executor: stopped with status {stopped}")
    sys.exit(status or stopped)


if __name__ == "__main__":
    main()

"""`make demo`: an executor with the demo model, and the reference scheduler against it, as two processes over gRPC.

What a newcomer would type in two terminals, in one. Both programs are started as a user starts them; this script knows
neither's insides. The executor is stopped with SIGTERM and must end with status 0.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130

try:
    import contextlib
    import json
    import os
    import signal
    import subprocess
    import threading
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

ROOT = Path(__file__).resolve().parent.parent
SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve", "demo", "--port", "0", "--log-format", "json")


def wait_until_serving(executor: subprocess.Popen[str], *, quiet: bool = False) -> str:
    """The target of the executor, once it serves; shows what it chose on the way, unless that is to be ``quiet``. The
    rest of its log is read and dropped."""
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
            case "backend_selected" if not quiet:
                print(f"executor: {event['choice']:<28} {event['reason']}", flush=True)
            case "ready":
                threading.Thread(target=executor.stderr.read, daemon=True).start()  # a full pipe would stop it
                return target
            case "startup_failed":
                sys.exit(f"executor: {event['error']}")
    sys.exit("the executor ended before it served")


@contextlib.contextmanager
def child(command: Sequence[str], stop: signal.Signals, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that is stopped by ``stop`` in the end. It is in a process group of its own: Ctrl-C reaches this script
    alone, which ends its programs in order."""
    with subprocess.Popen(command, cwd=ROOT, text=True, process_group=0, **options) as running:
        try:
            yield running
        finally:
            try:
                running.send_signal(stop)
                running.wait(60)
            finally:
                running.kill()  # where Ctrl-C comes once more, or it does not stop


def main() -> None:
    """Start, run, stop."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    scheduler = None
    try:
        with child(SERVE, signal.SIGTERM, stderr=subprocess.PIPE) as executor:
            try:
                target = wait_until_serving(executor)
            except KeyboardInterrupt:
                executor.kill()  # nobody is served yet, and a drain would wait for the model
                raise
            arguments = (sys.executable, "-m", "clients.scheduler", "--target", target, "--demo", *sys.argv[1:])
            with child(arguments, signal.SIGINT) as scheduler:
                status = scheduler.wait()
    except KeyboardInterrupt:
        if scheduler is None:  # it says so itself
            print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(f"executor: stopped with status {executor.returncode}")
    if not (status or executor.returncode):
        program = os.path.relpath(Path(sys.executable).with_name("ferrum-rpc"))
        print("\nnext: serve it, and ask it from another terminal")
        print(f"    {program} serve demo")
        print(f'    {program} generate "In the beginning"')
    sys.exit(status or executor.returncode)


if __name__ == "__main__":
    main()

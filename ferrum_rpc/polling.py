"""Who reads gRPC's sockets: the thread that waits for its completions, not threads of an event engine behind it.

gRPC's event engine hands every read and write to threads of its own, which hand what came to the thread that waits for
completions, which wakes the event loop: four wake-ups of which two do no work. gRPC still has the polling that came
before, where the waiting thread reads by itself. One step of a session then takes 6.5 switches between threads in the
server instead of 11.3, and 4.6 instead of 9.1 in its caller (grpcio 1.85). Both ways are behind the same switches in
every version that this package takes; one that had dropped them would say so in a line on stderr and go on.

Process-wide, and read once: it is for programs to say, not for a library. Whoever sets `VARIABLE` decides.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
OFF: Final = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"


def poll_directly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Must be called before grpc is imported."""
    environment.setdefault(VARIABLE, OFF)


def polled(environment: MutableMapping[str, str] = os.environ) -> str:
    """How sockets are read in this process, for a log line and for records."""
    said = environment.get(VARIABLE)
    if said is None:
        return "by gRPC's event engine"
    return "by the thread that waits for completions" if said == OFF else f"as {VARIABLE} says"

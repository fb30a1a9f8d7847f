"""What goes over the connection between rank 0 and another rank: pickled tuples.

Both ends are this program, and have shown each other the key of the connection (`multiprocessing.connection`) before
the first message is read.
"""

from __future__ import annotations

import pickle
import threading
from multiprocessing.connection import Connection
from typing import Any, Final

BEAT_S: Final = 0.25
"""A rank is heard of so often at least."""

SILENT_S: Final = 1.25
"""A rank that was not heard of for so long hangs."""

ABORT: Final = "abort"
"""What is carried out as soon as it is read, by whoever reads; everything else in its turn."""

JOIN_S: Final = 120.0
"""What ranks wait for each other before they work."""

END: Final = "end"

END_S: Final = 5.0
"""What an end may take before it is forced."""


class Channel:
    """One end. Any thread may send, one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Raises OSError where the other end is gone."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError where the other end is gone, or this one was closed."""
        try:
            data = self._connection.recv_bytes()
        except TypeError as error:  # closed by another thread meanwhile
            raise EOFError from error
        return pickle.loads(data)  # noqa: S301 - from our own program, see above

    def close(self) -> None:
        """The other end reads that this one is gone."""
        self._connection.close()

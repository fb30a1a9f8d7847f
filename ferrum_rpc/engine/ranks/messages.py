"""The messages between rank 0 and another rank.

rank 0 -> rank     (serial, the ranks that answer, the request, its arguments); `ABORT` and `END` among them
rank -> rank 0     ("hello", number, host, process, machine) first, ("answer", serial, answer),
                   ("failed", the request, error, epoch), ("heartbeat", bytes resident, bytes on its device)
"""

from __future__ import annotations

from typing import Final

HEARTBEAT_S: Final = 0.25
"""How often each rank reports that it lives."""

SILENT_S: Final = 1.25
"""A rank that is silent for so long hangs."""

ABORT: Final = "abort"
"""Requests that the reading thread carries out at once; all others are carried out in order."""

JOIN_S: Final = 120.0
"""The time that ranks wait for each other at the start."""

END: Final = "end"

END_S: Final = 5.0
"""The time limit of an orderly end."""

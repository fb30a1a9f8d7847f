"""What rank 0 and another rank say to each other over their channel.

rank 0 -> rank     (serial, the ranks that answer, what to do, its arguments); `ABORT` and `END` among them
rank -> rank 0     ("hello", number, host, process, machine) first, ("answer", serial, answer),
                   ("failed", what it was to do, error, epoch), ("heartbeat", bytes resident, bytes on its device)
"""

from __future__ import annotations

from typing import Final

HEARTBEAT_S: Final = 0.25
"""How often each rank reports that it lives."""

SILENT_S: Final = 1.25
"""A rank that was not heard of for so long hangs."""

ABORT: Final = "abort"
"""What is carried out as soon as it is read, by whoever reads; everything else in its turn."""

JOIN_S: Final = 120.0
"""What ranks wait for each other before they work."""

END: Final = "end"

END_S: Final = 5.0
"""What an end may take before it is forced."""

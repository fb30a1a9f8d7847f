"""R18 at the size of CI."""

from __future__ import annotations

from tests.faults.figures import hold
from tests.faults.one_port import r18_one_server_per_port


async def test_r18_the_second_server_on_a_port_ends_within_a_second_and_names_it() -> None:
    await hold(r18_one_server_per_port)

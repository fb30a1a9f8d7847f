"""Many executors of one model as one: who is there, who gets a sequence, and what becomes of it when its owner goes.

    async with FleetClient("dns:///executors:50051", connect=partial(ExecutorClient, session=True)) as fleet:
        async with fleet.sequence() as sequence:
            async for token in sequence.generate(b"In the beginning", max_tokens=64):
                ...

`client.fleet.sync` is the same for programs without asyncio. docs/fleet.md.
"""

from ferrum_rpc.client.fleet.client import FleetClient
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import Members
from ferrum_rpc.client.fleet.placement import Candidate, LongestPrefix, Placement
from ferrum_rpc.client.fleet.resolving import certificate_host
from ferrum_rpc.client.fleet.sequence import FleetSequence

__all__ = [
    "Candidate",
    "FleetClient",
    "FleetSequence",
    "LongestPrefix",
    "Member",
    "Members",
    "Placement",
    "certificate_host",
]

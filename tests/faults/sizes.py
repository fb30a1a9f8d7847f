"""How much of each fault: what fits CI, and what `make soak` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Size:
    """Counts of every promise's test. What is promised does not depend on the size, only how hard it is tried."""

    name: str
    handles: int
    """R1: handles that must not be accepted."""
    calls_under_loss: int
    """R2: steps under duplication, reordering, time-outs and dead connections."""
    calls_in_sessions: int
    """R2, by the client over a session: steps."""
    calls_under_packet_loss: int
    """R2, in a network namespace that drops packets: steps."""
    lease_s: float
    stall_s: float
    """R3: a lease, and for how long its owner's event loop stands still."""
    old_handles: int
    """R4: handles of the killed process."""
    drains: int
    """R5."""
    deadlines: int
    """R6: calls with deadlines and cancellations."""
    retried_calls: int
    """R7."""
    silences: int
    """R8: rounds of each kind of silence."""
    peak_s: float
    overload_s: float
    """R9: seconds of measuring the peak, and of four times that."""
    goodput_share: float
    """R9: what must be left of the peak. 0.9 is promised; where tests share two cores, a fifth of that is theirs."""
    abuse_s: float
    """R10: seconds of each abuse."""
    p99_floor_s: float
    """R10: a p99 below this counts as this: it is the scheduler's, where tests share two cores."""
    neighbour_calls: int
    neighbour_runs: int
    """R30: steps beside another tenant's full queue, and as many alone."""
    weight_files: int
    """R13: mutated weight files."""
    fuzz_direct: int
    """R14: messages for each handler, past gRPC."""
    fuzz_wire: int
    """R14: messages for each handler, through gRPC."""
    endings: int
    """R15: rounds of all endings."""
    leak_calls: int
    """R15: calls after warm-up that may not take memory."""
    leak_whole_lives: bool
    """R15: whether those calls create and release sequences; what is remembered of them takes a minute to fill."""
    expired_calls: int
    """R15: calls whose callers do not wait, for what grpc.aio loses by them."""
    adapter_cycles: int
    """R15: adapters that are loaded and unloaded."""
    refused_dials: int
    """R11, R12: rounds of every wrong way to come in."""
    crash_rounds: int
    """R16: rounds over all failpoints and actions."""
    second_servers: int
    """R18: attempts to bind a port that is taken."""
    hangs: int
    """R19: hangs that end."""
    bad_item_rounds: int
    """R20: rounds of every bad item beside a good one."""
    frame_pairs: int
    """R21: pairs of frames on one sequence."""
    unread_mib: int
    unread_calls: int
    unread_sessions: int
    """R22: size of an answer, and calls and sessions that ask for it and do not read."""
    background_rounds: int
    """R26: rounds of an exception in every loop."""
    rebuilt_histories: int
    restarts: int
    """R25: rounds of histories that are lost and rebuilt, within a process and over its end."""
    shared_prompts: int
    timed_prompts: int
    """R27: prompts with each model, and prompts whose time is taken."""
    transfer_kills: int
    """R28: kills of each side of a transfer."""
    poisoned_imports: int
    """R32: forged caches with each model, each through all that may carry them."""
    rank_deaths: int
    """R29: ranks that are killed or stopped."""
    fleet_sequences: int
    """R31 and R33: sequences over three executors."""
    front_texts: int
    front_streams: int
    """R15 and R31 with a worker in between: texts after warm-up, and streams over three executors."""
    front_dead: int
    front_unread: int
    """R22 and R30 with a worker in between: texts of each client that dies, and streams that are not read."""
    hung_patience_s: float
    short_stop_s: float
    long_stop_s: float
    """R33: a fleet's patience with one that hangs, and stops for less and for more than that."""
    hostile_messages: int
    """R30: messages of each kind that unfold into much."""
    content_calls: int
    content_mib: float
    """R34: calls with the largest contents before memory is measured first, and what ten times as many may take."""
    grammar_texts: int
    hostile_grammars: int
    hostile_kinds: int
    """R35: texts by grammars and by masks of the caller; rounds of hostile grammars beside a neighbour, and how many of
    those that are too complex and of those that are impossible are among them."""
    outsider_calls: int
    """R23: calls of each kind beside a crowd."""
    configurations: int
    """R24: configurations with other values of several keys."""
    absolute: bool
    """Whether times in seconds are held to what is promised: where tests share two cores, they are not ours."""


CI: Final = Size(
    name="ci",
    handles=3_000,
    calls_under_loss=400,
    calls_in_sessions=500,
    calls_under_packet_loss=200,
    lease_s=1.5,
    stall_s=0.5,
    old_handles=200,
    drains=2,
    deadlines=200,
    retried_calls=5,
    silences=1,
    peak_s=1.2,
    overload_s=1.8,
    goodput_share=0.72,
    abuse_s=0.6,
    p99_floor_s=0.1,
    neighbour_calls=40,
    neighbour_runs=10,
    weight_files=500,
    fuzz_direct=500,
    fuzz_wire=40,
    endings=1,
    leak_calls=3_000,
    leak_whole_lives=False,
    expired_calls=0,
    adapter_cycles=20,
    refused_dials=1,
    crash_rounds=1,
    second_servers=1,
    hangs=1,
    bad_item_rounds=1,
    frame_pairs=288,
    unread_mib=25,
    unread_calls=12,
    unread_sessions=4,
    background_rounds=1,
    rebuilt_histories=2,
    restarts=1,
    shared_prompts=8,
    timed_prompts=5,
    transfer_kills=5,
    poisoned_imports=1,
    rank_deaths=2,
    fleet_sequences=60,
    front_texts=24,
    front_streams=20,
    front_dead=2,
    front_unread=24,
    hung_patience_s=2.0,
    short_stop_s=2.4,
    long_stop_s=5.0,
    hostile_messages=6,
    content_calls=12,
    content_mib=16.0,
    grammar_texts=6,
    hostile_grammars=1,
    hostile_kinds=1,
    outsider_calls=30,
    configurations=25,
    absolute=False,
)

FULL: Final = Size(
    name="full",
    handles=1_000_000,
    calls_under_loss=100_000,
    calls_in_sessions=50_000,
    calls_under_packet_loss=10_000,
    lease_s=30.0,
    stall_s=10.0,
    old_handles=10_000,
    drains=100,
    deadlines=10_000,
    retried_calls=100,
    silences=20,
    peak_s=10.0,
    overload_s=60.0,
    goodput_share=0.9,
    abuse_s=20.0,
    p99_floor_s=0.002,
    neighbour_calls=2_000,
    neighbour_runs=400,
    weight_files=100_000,
    fuzz_direct=1_000_000,
    fuzz_wire=5_000,
    endings=100,
    leak_calls=100_000,
    leak_whole_lives=True,
    expired_calls=80_000,
    adapter_cycles=1_000,
    refused_dials=50,
    crash_rounds=100,
    second_servers=20,
    hangs=20,
    bad_item_rounds=100,
    frame_pairs=10_000,
    unread_mib=25,
    unread_calls=40,
    unread_sessions=100,
    background_rounds=50,
    rebuilt_histories=300,
    restarts=50,
    shared_prompts=500,
    timed_prompts=400,
    transfer_kills=100,
    poisoned_imports=100,
    rank_deaths=81,
    fleet_sequences=1_000,
    front_texts=1_000,
    front_streams=200,
    front_dead=32,
    front_unread=2_000,
    hung_patience_s=10.0,
    short_stop_s=3.0,
    long_stop_s=30.0,
    hostile_messages=300,
    content_calls=10_000,
    content_mib=64.0,
    grammar_texts=1_000,
    hostile_grammars=20,
    hostile_kinds=4,
    outsider_calls=1_000,
    configurations=5_000,
    absolute=True,
)

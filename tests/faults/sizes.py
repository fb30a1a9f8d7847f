"""How much of each fault: what fits CI, and what `make soak` runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final


def counts(ci: float, full: float) -> Any:
    """A field of `Size` with its value in CI and at full size."""
    return field(metadata={"ci": ci, "full": full})


@dataclass(frozen=True)
class Size:
    """Counts of every promise's test. What is promised does not depend on the size, only how hard it is tried."""

    name: str
    handles: int = counts(1_000, 1_000_000)
    """R1: handles that must not be accepted."""
    calls_under_loss: int = counts(400, 100_000)
    """R2: steps under duplication, reordering, time-outs and dead connections."""
    calls_in_sessions: int = counts(500, 50_000)
    """R2, by the client over a session: steps."""
    calls_under_packet_loss: int = counts(200, 10_000)
    """R2, in a network namespace that drops packets: steps."""
    lease_s: float = counts(1.5, 30.0)
    stall_s: float = counts(0.5, 10.0)
    """R3: a lease, and for how long its owner's event loop stands still."""
    old_handles: int = counts(200, 10_000)
    """R4: handles of the killed process."""
    drains: int = counts(2, 100)
    """R5."""
    deadlines: int = counts(100, 10_000)
    """R6: calls with deadlines and cancellations."""
    retried_calls: int = counts(5, 100)
    """R7."""
    silences: int = counts(1, 20)
    """R8: rounds of each kind of silence."""
    peak_s: float = counts(1.2, 10.0)
    overload_s: float = counts(1.8, 60.0)
    """R9: seconds of measuring the peak, and of four times that."""
    goodput_share: float = counts(0.72, 0.9)
    """R9: what must be left of the peak. 0.9 is promised; where tests share two cores, a fifth of that is theirs."""
    abuse_s: float = counts(0.6, 20.0)
    """R10: seconds of each abuse."""
    p99_floor_s: float = counts(0.1, 0.002)
    """R10: a p99 below this counts as this: it is the scheduler's, where tests share two cores."""
    neighbour_calls: int = counts(32, 2_000)
    neighbour_runs: int = counts(10, 400)
    """R30: steps beside another tenant's full queue, and as many alone."""
    weight_files: int = counts(300, 100_000)
    """R13: mutated weight files."""
    fuzz_direct: int = counts(200, 1_000_000)
    """R14: messages for each handler, past gRPC."""
    fuzz_wire: int = counts(20, 5_000)
    """R14: messages for each handler, through gRPC."""
    endings: int = counts(1, 100)
    """R15: rounds of all endings."""
    leak_calls: int = counts(2_000, 100_000)
    """R15: calls after warm-up that may not take memory."""
    leak_whole_lives: bool = counts(False, True)
    """R15: whether those calls create and release sequences; what is remembered of them takes a minute to fill."""
    adapter_cycles: int = counts(20, 1_000)
    """R15: adapters that are loaded and unloaded."""
    refused_dials: int = counts(1, 50)
    """R11, R12: rounds of every wrong way to come in."""
    crash_rounds: int = counts(1, 100)
    """R16: rounds over all failpoints and actions."""
    crash_share: float = counts(1.0, 1.0)
    """R16: share of the failpoints at which servers die."""
    second_servers: int = counts(1, 20)
    """R18: attempts to bind a port that is taken."""
    hangs: int = counts(1, 20)
    """R19: hangs that end."""
    bad_item_rounds: int = counts(1, 100)
    """R20: rounds of every bad item beside a good one."""
    frame_pairs: int = counts(288, 10_000)
    """R21: pairs of frames on one sequence."""
    unread_mib: int = counts(25, 25)
    unread_calls: int = counts(12, 40)
    unread_sessions: int = counts(4, 100)
    """R22: size of an answer, and calls and sessions that ask for it and do not read."""
    background_rounds: int = counts(1, 50)
    """R26: rounds of an exception in every loop."""
    rebuilt_histories: int = counts(2, 300)
    restarts: int = counts(1, 50)
    """R25: rounds of histories that are lost and rebuilt, within a process and over its end."""
    shared_prompts: int = counts(4, 500)
    timed_prompts: int = counts(3, 400)
    """R27: prompts with each model, and prompts whose time is taken."""
    transfer_kills: int = counts(5, 100)
    """R28: kills of each side of a transfer."""
    poisoned_imports: int = counts(1, 100)
    """R32: forged caches with each model, each through all that may carry them."""
    rank_deaths: int = counts(2, 81)
    """R29: ranks that are killed or stopped."""
    fleet_sequences: int = counts(40, 1_000)
    """R31 and R33: sequences over three executors."""
    front_texts: int = counts(24, 1_000)
    front_streams: int = counts(20, 200)
    """R15 and R31 with a worker in between: texts after warm-up, and streams over three executors."""
    front_dead: int = counts(2, 32)
    front_unread: int = counts(24, 2_000)
    """R22 and R30 with a worker in between: texts of each client that dies, and streams that are not read."""
    hung_patience_s: float = counts(2.0, 10.0)
    short_stop_s: float = counts(2.4, 3.0)
    long_stop_s: float = counts(5.0, 30.0)
    """R33: a fleet's patience with one that hangs, and stops for less and for more than that."""
    hostile_messages: int = counts(4, 300)
    """R30: messages of each kind that unfold into much."""
    content_calls: int = counts(12, 10_000)
    content_mib: float = counts(16.0, 64.0)
    """R34: calls with the largest contents before memory is measured first, and what ten times as many may take."""
    grammar_texts: int = counts(6, 1_000)
    hostile_grammars: int = counts(1, 20)
    hostile_kinds: int = counts(1, 4)
    """R35: texts by grammars and by masks of the caller; rounds of hostile grammars beside a neighbour, and how many of
    those that are too complex and of those that are impossible are among them."""
    state_histories: int = counts(6, 2_000)
    """R36: sequences of a model with recurrent layers, each of some ten steps."""
    outsider_calls: int = counts(20, 1_000)
    """R23: calls of each kind beside a crowd."""
    configurations: int = counts(25, 5_000)
    """R24: configurations with other values of several keys."""
    absolute: bool = counts(False, True)
    """Whether times in seconds are held to what is promised: where tests share two cores, they are not ours."""


CI, FULL = (
    Size(name, **{each.name: each.metadata[name] for each in fields(Size) if each.metadata}) for name in ("ci", "full")
)


def scaled(size: Size, share: float) -> Size:
    """A size with that share of its counts, at least one each; seconds and shares stay."""
    counts: dict[str, Any] = {
        field.name: max(1, round(value * share))
        for field in fields(size)
        if isinstance(value := getattr(size, field.name), int) and not isinstance(value, bool)
    }
    return replace(size, name=f"{size.name} x {share:g}", **counts)


AGAIN: Final = replace(scaled(CI, 0.25), crash_share=0.25, shared_prompts=16, timed_prompts=CI.timed_prompts)
"""Of a promise that is tried once more in CI, with another model."""

GRAMMAR_NOISE_BYTES: Final = 4 << 20
"""R15: what a process moves by that computes a model's steps of ever new sizes: measured, 2.5 MB for 50 texts."""
TEXT_BYTES: Final = 16 << 10
"""R15: the answers of a text and the end of its sequence are remembered for a while: measured, 8 KiB."""

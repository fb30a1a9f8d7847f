"""Every promise and the function that tries to break it: what `make soak` runs, and the tests at CI size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from tests.faults.abuse import r10_abuse_does_not_hurt_others
from tests.faults.adapters import r15_adapters_come_and_go
from tests.faults.any_bytes import r14_any_bytes_get_a_canonical_answer
from tests.faults.background import r26_a_background_task_never_dies_silently
from tests.faults.bad_items import r20_a_bad_item_harms_nobody
from tests.faults.contents import r34_memory_by_content_is_bounded
from tests.faults.crash_points import r16_a_crash_is_survivable
from tests.faults.crowd import r23_no_caller_starves_another
from tests.faults.dead_peers import r8_a_dead_peer_is_noticed
from tests.faults.deadlines import r6_deadlines_and_cancels_are_honoured
from tests.faults.drain import r5_a_drain_loses_nothing
from tests.faults.error_contract import r17_the_error_contract_is_true
from tests.faults.exactly_once import r2_by_a_scheduler, r2_exactly_once, r2_in_sessions, r2_under_packet_loss
from tests.faults.figures import Figures
from tests.faults.fleet import r31_a_fleet_loses_no_token
from tests.faults.frame_order import r21_frames_keep_their_order
from tests.faults.front_callers import r22_a_front_holds_nothing_of_the_dead, r30_no_caller_stops_a_front
from tests.faults.fronts import r15_a_front_leaks_nothing, r31_a_front_loses_no_token
from tests.faults.grammars import r35_a_grammar_is_a_function_of_tokens
from tests.faults.handles import r1_handles_cannot_be_forged
from tests.faults.health import r19_health_tells_the_truth
from tests.faults.hostile import r30_no_caller_stops_the_server
from tests.faults.hung import r33_one_truth_about_a_hung_device
from tests.faults.imports import r32_an_import_harms_nobody_else
from tests.faults.leaks import r15_grammars_come_and_go, r15_nothing_leaks
from tests.faults.neighbours import r30_a_neighbour_takes_its_share_alone
from tests.faults.one_port import r18_one_server_per_port
from tests.faults.orphans import r3_orphans_are_freed
from tests.faults.overload import r9_overload_bends
from tests.faults.prefixes import r27_a_prefix_is_shared_by_those_who_may
from tests.faults.ranks import r29_a_ranks_death_is_known
from tests.faults.rebuilds import r25_a_lost_sequence_is_rebuilt_exactly
from tests.faults.restart import r4_a_restart_is_never_mistaken
from tests.faults.retries import r7_retries_are_safe
from tests.faults.security import r11_only_the_right_certificates_get_in, r12_every_method_asks_who_calls
from tests.faults.sizes import Size
from tests.faults.transfers import r28_a_transfer_is_whole_or_nothing
from tests.faults.unread import r22_the_dead_hold_nothing
from tests.faults.weights import r13_weights_are_data, r24_a_configuration_is_honoured_or_refused

PROMISES: Final[tuple[Callable[[Size], Awaitable[Figures]], ...]] = (
    r1_handles_cannot_be_forged,
    r2_exactly_once,
    r2_in_sessions,
    r2_by_a_scheduler,
    r2_under_packet_loss,
    r3_orphans_are_freed,
    r4_a_restart_is_never_mistaken,
    r5_a_drain_loses_nothing,
    r6_deadlines_and_cancels_are_honoured,
    r7_retries_are_safe,
    r8_a_dead_peer_is_noticed,
    r9_overload_bends,
    r10_abuse_does_not_hurt_others,
    r11_only_the_right_certificates_get_in,
    r12_every_method_asks_who_calls,
    r13_weights_are_data,
    r14_any_bytes_get_a_canonical_answer,
    r15_nothing_leaks,
    r15_adapters_come_and_go,
    r15_grammars_come_and_go,
    r15_a_front_leaks_nothing,
    r16_a_crash_is_survivable,
    r17_the_error_contract_is_true,
    r18_one_server_per_port,
    r19_health_tells_the_truth,
    r20_a_bad_item_harms_nobody,
    r21_frames_keep_their_order,
    r22_the_dead_hold_nothing,
    r22_a_front_holds_nothing_of_the_dead,
    r23_no_caller_starves_another,
    r24_a_configuration_is_honoured_or_refused,
    r25_a_lost_sequence_is_rebuilt_exactly,
    r26_a_background_task_never_dies_silently,
    r27_a_prefix_is_shared_by_those_who_may,
    r28_a_transfer_is_whole_or_nothing,
    r29_a_ranks_death_is_known,
    r30_no_caller_stops_the_server,
    r30_a_neighbour_takes_its_share_alone,
    r30_no_caller_stops_a_front,
    r31_a_fleet_loses_no_token,
    r31_a_front_loses_no_token,
    r32_an_import_harms_nobody_else,
    r33_one_truth_about_a_hung_device,
    r34_memory_by_content_is_bounded,
    r35_a_grammar_is_a_function_of_tokens,
)
"""In the order of their numbers."""


def number(promise: Callable[[Size], Awaitable[Figures]]) -> str:
    """``R9`` of ``r9_overload_bends``."""
    return promise.__name__.partition("_")[0].upper()

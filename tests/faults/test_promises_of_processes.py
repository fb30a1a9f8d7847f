"""Promises that need a server process to kill, stop, drain and overload, at the size of CI."""

from __future__ import annotations

import pytest

from tests.faults.abuse import r10_abuse_does_not_hurt_others
from tests.faults.adapters import r15_adapters_come_and_go
from tests.faults.contents import r34_memory_by_content_is_bounded
from tests.faults.crowd import r23_no_caller_starves_another
from tests.faults.dead_peers import r8_a_dead_peer_is_noticed
from tests.faults.drain import r5_a_drain_loses_nothing
from tests.faults.exactly_once import r2_by_a_scheduler, r2_exactly_once, r2_in_sessions, r2_under_packet_loss
from tests.faults.figures import hold
from tests.faults.fleet import r31_a_fleet_loses_no_token
from tests.faults.grammars import r35_a_grammar_is_a_function_of_tokens
from tests.faults.hostile import r30_no_caller_stops_the_server
from tests.faults.hung import r33_one_truth_about_a_hung_device
from tests.faults.leaks import r15_grammars_come_and_go
from tests.faults.neighbours import r30_a_neighbour_takes_its_share_alone
from tests.faults.netns import missing
from tests.faults.orphans import r3_orphans_are_freed
from tests.faults.overload import r9_overload_bends
from tests.faults.ranks import r29_a_ranks_death_is_known
from tests.faults.rebuilds import r25_a_lost_sequence_is_rebuilt_exactly
from tests.faults.restart import r4_a_restart_is_never_mistaken
from tests.faults.transfers import r28_a_transfer_is_whole_or_nothing
from tests.faults.unread import r22_the_dead_hold_nothing


async def test_r2_a_step_is_applied_exactly_once() -> None:
    await hold(r2_exactly_once)


async def test_r2_a_step_is_applied_exactly_once_in_sessions() -> None:
    await hold(r2_in_sessions)


async def test_r2_a_step_is_applied_exactly_once_by_a_scheduler() -> None:
    await hold(r2_by_a_scheduler)


@pytest.mark.root
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_r2_a_step_is_applied_exactly_once_over_a_network_that_loses_packets() -> None:
    await hold(r2_under_packet_loss)


async def test_r3_orphans_are_freed_and_the_living_are_not() -> None:
    await hold(r3_orphans_are_freed)


async def test_r4_a_restart_is_never_mistaken() -> None:
    await hold(r4_a_restart_is_never_mistaken)


async def test_r5_a_drain_loses_nothing() -> None:
    await hold(r5_a_drain_loses_nothing)


async def test_r8_a_dead_peer_is_noticed() -> None:
    await hold(r8_a_dead_peer_is_noticed)


async def test_r9_overload_bends_and_never_breaks() -> None:
    await hold(r9_overload_bends)


async def test_r10_http2_abuse_does_not_hurt_others() -> None:
    await hold(r10_abuse_does_not_hurt_others)


async def test_r15_adapters_come_and_go() -> None:
    await hold(r15_adapters_come_and_go)


async def test_r15_grammars_come_and_go() -> None:
    await hold(r15_grammars_come_and_go)


async def test_r22_the_dead_hold_nothing() -> None:
    await hold(r22_the_dead_hold_nothing)


async def test_r23_no_caller_starves_another() -> None:
    await hold(r23_no_caller_starves_another)


async def test_r25_a_lost_sequence_is_rebuilt_exactly() -> None:
    await hold(r25_a_lost_sequence_is_rebuilt_exactly)


async def test_r28_a_transfer_is_whole_or_nothing() -> None:
    await hold(r28_a_transfer_is_whole_or_nothing)


async def test_r29_a_ranks_death_is_known() -> None:
    await hold(r29_a_ranks_death_is_known)


async def test_r30_no_caller_stops_the_server() -> None:
    await hold(r30_no_caller_stops_the_server)


async def test_r30_a_neighbour_takes_its_share_alone() -> None:
    await hold(r30_a_neighbour_takes_its_share_alone)


async def test_r31_a_fleet_loses_no_token() -> None:
    await hold(r31_a_fleet_loses_no_token)


async def test_r33_one_truth_about_a_hung_device() -> None:
    await hold(r33_one_truth_about_a_hung_device)


async def test_r34_memory_by_content_is_bounded() -> None:
    await hold(r34_memory_by_content_is_bounded)


async def test_r35_a_grammar_is_a_function_of_tokens() -> None:
    await hold(r35_a_grammar_is_a_function_of_tokens)

"""What tests look at inside of a server that nothing public shows, each private name of the product in one place.

Most tests work through public seams. Some promises are about what no caller sees: that nothing is left over, that
nothing is counted twice. Their tests ask here, so that a change of a private name is a change of one line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ferrum_rpc.client.fleet import Members
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.step import Stage
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.pool import BlockPool
from ferrum_rpc.kv.sequence import SequenceBlocks
from ferrum_rpc.scheduler import Scheduler
from ferrum_rpc.service.records import Account
from ferrum_rpc.service.replay import Entry, ReplayLog
from ferrum_rpc.service.state import ServerState

# --- the cache --------------------------------------------------------------------------------------------------------


def sequences(kv: KvManager) -> dict[int, SequenceBlocks]:
    return kv._sequences


def table_of(kv: KvManager, sequence: int) -> np.ndarray:
    """The blocks of a sequence, int32 [n]."""
    table = kv._sequences[sequence].table
    return table.view(len(table))


def pool_of(kv: KvManager) -> BlockPool:
    return kv._pool


def free_list(pool: BlockPool) -> list[int]:
    """The one that is given out next is the last."""
    return pool._free


def references(pool: BlockPool) -> np.ndarray:
    """By block, int32 [num_blocks]; the prefix cache's own is one."""
    return pool._references


def idle_blocks(pool: BlockPool) -> Iterable[int]:
    """Published, and of no sequence."""
    return pool._idle


def kept_blocks(pool: BlockPool) -> np.ndarray:
    """Whether the prefix cache has each block, bool [num_blocks]."""
    return pool._kept


# --- the engine -------------------------------------------------------------------------------------------------------


def set_stage(runner: TorchRunner, stage: Stage | None) -> None:
    """Call ``stage`` with the name of each stage of a step from now on."""
    runner._stage = stage  # type: ignore[assignment]


def imports_of(runner: TorchRunner) -> Mapping[int, Any]:
    return runner._imports


def in_flight(runner: TorchRunner) -> list[Any]:
    """The steps that were begun and not finished."""
    return runner._under_way


def held_bytes(thing: object) -> int:
    """The memory of all tensors that an object of the package refers to, however deep."""
    storages, seen, waiting = dict[int, int](), set[int](), [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif type(each).__module__.startswith("ferrum_rpc."):
            waiting += getattr(each, "__dict__", {}).values()
    return sum(storages.values())


def ranks_of(runner: TorchRunner) -> Any:
    """The `Ranks` that rank 0 leads."""
    return runner.compute._ranks  # type: ignore[attr-defined]


def module_of(model: Any) -> Any:
    """The module of a model that transformers runs."""
    return model._model


def adapters_of(part: Any) -> Adapters:
    """The adapters of a runner, or of another rank's phase."""
    found: Adapters = part._adapters
    return found


def arrived(engine: Any) -> int:
    """Pieces of work that the engine has not looked at."""
    return int(engine._arrived.qsize())


# --- clients ----------------------------------------------------------------------------------------------------------


def name_targets(members: Members, *targets: str) -> None:
    """As if these were all that the names of a fleet lead to now."""
    members._listed("", targets)


def live_requests(scheduler: Scheduler) -> int:
    """Of which the scheduler still has something."""
    return len(scheduler._live)


# --- the service ------------------------------------------------------------------------------------------------------


def accounts(state: ServerState) -> Iterable[Account]:
    return state.quotas._accounts.values()


def creating(state: ServerState) -> int:
    """Calls that are to create a sequence, and have not."""
    return len(state._creating)


def owners(table: Any) -> Collection[Any]:
    """Of a replay log, or of a table of masks or grammars: what is kept for each caller."""
    return table._owners.values()  # type: ignore[no-any-return]


def uses(table: Any) -> list[int]:
    """How many calls use each mask or grammar of a table."""
    return [each.uses for owner in owners(table) for each in owner.contents.values()]


def recorded(log: ReplayLog) -> list[Entry]:
    """All entries of a replay log."""
    return [entry for owner in owners(log) for each in owner.scopes.values() for entry in each.values()]


def parking_jobs(state: ServerState) -> Any:
    return state.parked._jobs


def grammar_pool(runner: Any) -> Any:
    """The executor's processes of grammars."""
    return runner.constraints._pool

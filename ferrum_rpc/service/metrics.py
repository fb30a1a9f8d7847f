"""The executor's metrics under their Prometheus names.

Nothing is stored here. `Metrics.collect` runs in the metrics server's thread while the event loop continues: it reads
integers and copies dicts, each atomically in the interpreter, and never waits for the loop. So a scrape works while the
loop or the model is stuck, when the metrics are needed most; the values may be a call apart. Labels come from fixed
sets (method, code, reason, cause, state, check, file, rank, failpoint): nothing that a caller sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ferrum_rpc import __version__
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.service.meters import Histogram, StepMeter
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.state import Lifecycle, ServerState
from ferrum_rpc.wire.info import SCHEMA_REVISION

PREFIX: Final = "ferrum_"


@dataclass(eq=False)
class Metrics(Collector):
    """The metrics of one server; register it in a registry of the server's own. ``failpoints``: how often each fired.
    ``lines_dropped()``: dropped log lines. ``health()``: see `HealthService.gauges`; ``expiries()``: see
    `ServerCertificates`. A bounded gauge has another one with its limit, of the same name and ``_limit``."""

    state: ServerState
    calls: CallLog
    steps: StepMeter
    failpoints: Mapping[str, int] = field(default_factory=dict)
    lines_dropped: Callable[[], int] = lambda: 0
    health: Callable[[], Mapping[str, float]] = dict
    expiries: Callable[[], Mapping[str, float]] = dict

    def collect(self) -> Iterator[Metric]:
        yield from self._life()
        yield from self._sequences()
        yield from self._cache()
        yield from self._transfers()
        yield from self._steps()
        yield from self._rpcs()
        yield from self._ranks()

    def _life(self) -> Iterator[Metric]:
        state = self.state
        build = {"version": __version__, "schema_revision": str(SCHEMA_REVISION)}
        yield _info("build_info", "Version of the executor and of its contract.", build)
        with suppress(ExecutorError):  # while the model loads, and when it has failed
            model = state.model
            what = {"model": model.name, "architecture": model.architecture, "device": state.device.name}
            yield _info("model_info", "What is served, and where it runs.", what)
        condition = state.condition
        states = {each.value: float(each is condition) for each in Lifecycle}
        yield _gauge("executor_state", "1 for the current state of the executor.", states, "state")
        yield _gauge("health", "1 if a health check is answered SERVING, by check.", self.health(), "check")
        ends, text = self.expiries(), "When the first certificate of a file ends, since 1970."
        yield _gauge("certificate_expiry_timestamp_seconds", text, ends, "file")
        yield _counter(
            "log_lines_dropped", "Log lines dropped because their reader was too slow.", self.lines_dropped()
        )
        failures = state.supervisor.failures
        yield _counter("background_failures", "Failures of background tasks, which continue.", failures, "task")
        if self.failpoints:
            yield _counter("failpoints_fired", "Injected failures.", self.failpoints, "name")

    def _sequences(self) -> Iterator[Metric]:
        state, counters, limits, replay = self.state, self.state.counters, self.state.limits, self.state.replay
        yield from _bounded("sequences", "Live sequences.", len(state.handles), limits.max_sequences)
        yield _counter("sequences_created", "Created sequences.", counters.sequences_created)
        yield _counter("sequences_forked", "Created sequences that are forks.", counters.sequences_forked)
        yield _counter("sequences_ended", "Sequences that ended, by cause.", counters.ended, "cause")
        yield from _bounded("leases", "Live leases.", len(state.leases), limits.max_leases)
        yield _counter("leases_expired", "Leases that were not renewed in time.", counters.leases_expired)
        yield from _bounded("sessions", "Open sessions.", state.sessions, limits.max_sessions)
        yield from _bounded("watchers", "Streams of cache events.", state.watchers, limits.max_watchers)
        yield from _bounded("token_masks", "Registered token masks.", len(state.masks), limits.max_token_masks)
        yield from _bounded("grammars", "Registered grammars.", len(state.grammars), limits.max_grammars)
        adapters = list(state.adapters)
        adapter_bytes = sum(each.nbytes for each in adapters)
        yield from _bounded("adapters", "Loaded adapters.", len(adapters), limits.max_adapters)
        yield from _bounded("adapter_bytes", "Bytes of loaded adapters.", adapter_bytes, limits.adapter_memory)
        yield _gauge("adapter_sequences", "Live sequences with an adapter.", sum(each.sequences for each in adapters))
        yield _counter("adapter_tokens", "Tokens committed to sequences with an adapter.", counters.adapter_tokens)
        yield _counter("tokens_truncated", "Tokens that callers rolled back.", counters.tokens_truncated)
        yield _counter("replays", "Recorded answers sent again for the same request id.", replay.replays)
        kept = "Bytes that recorded answers take: rows, request ids, digests of requests, handles, tokens that stay."
        yield from _bounded("replay_bytes", kept, replay.bytes, replay.limit)
        unread = "Bytes of large answers that are not read yet."
        yield from _bounded("unread_bytes", unread, state.unread.bytes, state.unread.limit)

    def _steps(self) -> Iterator[Metric]:
        state, steps = self.state, self.steps
        engine, pressure, limits = state.engine.counters, state.pressure(), state.limits
        waiting = "that wait for a step."
        yield from _bounded("queue_items", f"Items {waiting}", pressure.queued_items, limits.max_queued_items)
        yield from _bounded("queue_tokens", f"Tokens {waiting}", pressure.queued_tokens, limits.max_queued_tokens)
        yield from _bounded("running_items", "Runs under way.", pressure.running_items, limits.max_running)
        yield _counter("steps", "Forward passes that committed something.", engine.steps)
        yield _counter("step_tokens", "Tokens that steps committed.", engine.tokens)
        yield _counter(
            "searched_tokens", "Of the step tokens, those looked up in the prefix cache.", engine.searched_tokens
        )
        yield _counter("cached_tokens", "Of the searched tokens, those found and not computed.", engine.cached_tokens)
        yield _counter(
            "recomputed_tokens", "Tokens fed again, because a sequence had gone back too far.", engine.recomputed_tokens
        )
        yield _counter("rows", "Rows that steps returned.", engine.rows)
        yield _counter("blocks_copied", "Blocks copied because they were shared.", engine.blocks_copied)
        yield _histogram("step_seconds", "Duration of a forward pass.", steps.seconds)
        yield _histogram("step_size_tokens", "Tokens of a step.", steps.tokens)
        yield _gauge("step_size_tokens_limit", "The maximum, without those of runs.", limits.max_batch_tokens)
        yield _histogram("step_size_sequences", "Sequences of a step.", steps.sequences)
        yield _gauge("step_size_sequences_limit", "The maximum, without those of runs.", limits.max_batch_items)
        yield _histogram("queue_seconds", "Time that a submission waited for its step.", steps.queue_seconds)

    def _ranks(self) -> Iterator[Metric]:
        found = {str(number): rank for number, rank in enumerate(self.state.engine.ranks)}
        alive = {number: float(rank.alive) for number, rank in found.items()}
        resident = {number: rank.resident_bytes for number, rank in found.items() if rank.resident_bytes}
        device = {number: rank.device_bytes for number, rank in found.items() if rank.device_bytes}
        yield _gauge("rank_alive", "1 for each live process of the model.", alive, "rank")
        yield _gauge("rank_resident_memory_bytes", "Resident memory of the process.", resident, "rank")
        yield _gauge("rank_device_memory_bytes", "GPU memory that the process has reserved.", device, "rank")

    def _cache(self) -> Iterator[Metric]:
        state, cache, pressure = self.state, self.state.engine.cache, self.state.pressure()
        cached = cache.cached_blocks
        used = pressure.total_blocks - pressure.free_blocks
        blocks = {"free": pressure.free_blocks - cached, "cached": cached, "used": used}
        yield _gauge("kv_blocks", "Blocks of the KV cache, by state.", blocks, "state")
        yield _gauge("kv_blocks_limit", "All blocks of the KV cache.", pressure.total_blocks)
        kept, used_slots = cache.checkpoints, pressure.total_slots - pressure.free_slots
        slots = {"free": pressure.free_slots - kept, "cached": kept, "used": used_slots}
        yield _gauge("kv_slots", "Slots for recurrent states, by state.", slots, "state")
        yield _gauge("kv_slots_limit", "All slots for recurrent states.", pressure.total_slots)
        yield _counter(
            "checkpoints_dropped", "Checkpoints dropped because another needed the slot.", cache.checkpoints_dropped
        )
        yield _counter("blocks_evicted", "Blocks evicted from the prefix cache.", cache.blocks_evicted)
        yield _counter(
            "blocks_evicted_seconds", "Time that evicted blocks had been in the prefix cache.", cache.evicted_s
        )
        yield from _bounded("kv_tier_bytes", "Blocks in the second tier.", cache.tier_bytes, state.limits.kv_tier_bytes)
        yield _gauge("parked_sequences", "Sequences whose cache is in a file.", state.parked.sequences)
        room = state.limits.kv_park_bytes if state.parked.offered else 0
        yield from _bounded("parked_bytes", "Bytes of those files.", state.parked.bytes, room)
        yield _counter("sequences_parked", "Sequences that were parked.", state.counters.sequences_parked)
        yield _counter("sequences_exported", "Sequences exported completely.", state.counters.sequences_exported)
        yield _counter("sequences_imported", "Sequences created from an import.", state.counters.sequences_imported)
        imports = state.unfinished_imports()
        yield _gauge("unfinished_imports", "Incomplete imports.", len(imports))
        held = sum(map(state.quotas.blocks, imports))
        yield _gauge("unfinished_import_blocks", "Blocks held by incomplete imports.", held)
        yield _gauge("kv_block_tokens", "Tokens per block.", pressure.block_size)

    def _transfers(self) -> Iterator[Metric]:
        meters = {direction.value: meter for direction, meter in self.state.transfers.items()}
        label, text = "direction", "Duration of transfers that moved something."
        seconds = HistogramMetricFamily(f"{PREFIX}transfer_seconds", text, labels=(label,))
        for direction, meter in meters.items():
            seconds.add_metric((direction,), *meter.seconds.snapshot())
        yield seconds
        now = {direction: meter.now for direction, meter in meters.items()}
        yield _gauge("transfers", "Transfers of caches in progress.", now, label)
        yield _gauge("transfers_limit", "The maximum in either direction.", self.state.limits.max_transfers)
        moved = {direction: meter.bytes for direction, meter in meters.items()}
        yield _counter("transfer_bytes", "Bytes of K and V transferred.", moved, label)
        failures = {direction: meter.failures for direction, meter in meters.items()}
        yield _counter("transfer_failures", "Transfers that ended early.", failures, label)

    def _rpcs(self) -> Iterator[Metric]:
        methods = list(self.calls.methods.items())
        rpcs = CounterMetricFamily(f"{PREFIX}rpcs", "Calls that ended, by status code.", labels=("method", "code"))
        items = CounterMetricFamily(f"{PREFIX}items", "Work items that calls carried.", labels=("method",))
        errors = CounterMetricFamily(f"{PREFIX}item_errors", "Work items refused inside a batch.", labels=("method",))
        seconds = HistogramMetricFamily(f"{PREFIX}rpc_seconds", "Duration of unary calls.", labels=("method",))
        for name, count in methods:
            for code, ended in list(count.codes.items()):
                rpcs.add_metric((name, code), ended)
            if count.items:
                items.add_metric((name,), count.items)
                errors.add_metric((name,), count.item_errors)
            buckets, total = count.seconds.snapshot()
            if buckets[-1][1]:
                seconds.add_metric((name,), buckets, total)
        yield from (rpcs, items, errors, seconds)
        yield _histogram("session_item_seconds", "Time until a session's item was answered.", self.calls.session_items)
        yield _gauge("rpcs_in_flight", "Unary calls in flight.", self.calls.in_flight)
        yield _gauge("streams", "Open streams.", self.calls.streams)
        refusals = {reason.value: count for reason, count in self.calls.refusals.counts.items()}
        yield _counter("refusals", "Calls and items refused, by reason.", refusals, "reason")
        foreign = self.state.handles.foreign
        yield _counter("foreign_handles", "Handles of another process that were refused.", foreign)


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """A registry with the executor's and its process's metrics."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return registry


def _family(kind: type[Any], name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    """A gauge or a counter: with one value, or one per value of a ``label``."""
    if not isinstance(values, Mapping):
        return cast(Metric, kind(PREFIX + name, text, value=values))
    family = kind(PREFIX + name, text, labels=(label,))
    for each, value in list(values.items()):
        family.add_metric((each,), value)
    return cast(Metric, family)


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _bounded(name: str, text: str, value: float, limit: float) -> Iterator[Metric]:
    """A gauge and its limit."""
    yield _gauge(name, text, value)
    yield _gauge(f"{name}_limit", f"The limit of {PREFIX}{name}.", limit)


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), 1)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, total = histogram.snapshot()
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=total)

"""The executor's numbers under their Prometheus names, read from the books when somebody scrapes.

Nothing is kept here. `Metrics.collect` runs in the metrics server's thread while the event loop goes on: it reads
integers and takes copies of dicts, each in one step of the interpreter, and never waits for the loop. So a scrape
answers while the loop is busy, and the numbers of one scrape may be a call apart.

Labels come from fixed sets (method, code, reason, cause, state, failpoint): nothing that a caller sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ferrum_rpc import __version__
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.service.books import Books, Lifecycle
from ferrum_rpc.service.meters import Histogram, StepMeter
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.wire.revision import SCHEMA_REVISION

PREFIX: Final = "ferrum_"


class Metrics(Collector):
    """One server's numbers; register it in a registry of the server's own. ``failpoints``: how often each fired.
    ``lines_dropped()``: log lines that nobody read."""

    def __init__(
        self,
        books: Books,
        calls: CallLog,
        steps: StepMeter,
        failpoints: Mapping[str, int] | None = None,
        lines_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._books = books
        self._calls = calls
        self._steps = steps
        self._failpoints = failpoints or {}
        self._lines_dropped = lines_dropped

    def collect(self) -> Iterator[Metric]:
        """Every family, as of now."""
        yield from self._process()
        yield from self._sequences()
        yield from self._cache()
        yield from self._work()
        yield from self._rpcs()

    def _process(self) -> Iterator[Metric]:
        books = self._books
        build = {"version": __version__, "schema_revision": str(SCHEMA_REVISION)}
        yield _info("build_info", "Version of the executor and of its contract.", build)
        try:
            model, device = books.model, books.device
        except ExecutorError:  # loading, or gone
            pass
        else:
            what = {"model": model.name, "architecture": model.architecture, "device": device.name}
            yield _info("model_info", "What is served, and where it runs.", what)
        states = {state.value: float(state is books.state) for state in Lifecycle}
        yield _gauges("executor_state", "1 for the state that the executor is in.", "state", states)
        yield _counter("log_lines_dropped", "Log lines that their reader was too slow for.", self._lines_dropped())
        failures = books.supervisor.failures
        yield _counters("background_failures", "Failures of background tasks, which go on.", "task", failures)
        if self._failpoints:
            yield _counters("failpoints_fired", "Failures that were asked for.", "name", self._failpoints)

    def _sequences(self) -> Iterator[Metric]:
        books, counters = self._books, self._books.counters
        yield _gauge("sequences", "Live sequences.", len(books.handles))
        yield _counter("sequences_created", "Sequences that came to be.", counters.created)
        yield _counters("sequences_ended", "Sequences that ended, by cause.", "cause", counters.ended)
        yield _gauge("leases", "Live leases.", len(books.leases))
        yield _counter("leases_expired", "Leases that were not renewed in time.", counters.leases_expired)
        yield _gauge("sessions", "Open sessions.", books.sessions)

    def _cache(self) -> Iterator[Metric]:
        pressure, counters, replay = self._books.pressure(), self._books.counters, self._books.replay
        blocks = {"free": pressure.free_blocks, "used": pressure.total_blocks - pressure.free_blocks}
        yield _gauges("kv_blocks", "Blocks of the KV cache, by state.", "state", blocks)
        yield _gauge("kv_block_tokens", "Tokens that a block holds.", pressure.block_size)
        yield _counter("tokens_truncated", "Tokens that callers rolled back.", counters.tokens_truncated)
        yield _counter("replays", "Recorded answers given again to the same request id.", replay.replays)
        yield _gauge("replay_bytes", "Bytes of rows in recorded answers.", replay.bytes)

    def _work(self) -> Iterator[Metric]:
        pressure, engine, steps = self._books.pressure(), self._books.engine.counters, self._steps
        yield _gauge("queue_items", "Items that wait for a step.", pressure.queued_items)
        yield _gauge("queue_tokens", "Tokens that wait for a step.", pressure.queued_tokens)
        yield _counter("steps", "Forward passes that committed something.", engine.steps)
        yield _counter("step_tokens", "Tokens that steps committed.", engine.tokens)
        yield _counter("rows", "Rows that steps returned.", engine.rows)
        yield _counter("blocks_copied", "Blocks copied because they were shared.", engine.blocks_copied)
        yield _histogram("step_seconds", "Duration of a forward pass.", steps.seconds)
        yield _histogram("step_size_tokens", "Tokens of a step.", steps.tokens)
        yield _histogram("step_size_sequences", "Sequences of a step.", steps.sequences)
        yield _histogram("queue_seconds", "Time that a submission waited for its step.", steps.queue_seconds)

    def _rpcs(self) -> Iterator[Metric]:
        methods = list(self._calls.methods.items())
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
        yield _gauge("rpcs_in_flight", "Unary calls in flight.", self._calls.in_flight)
        yield _gauge("streams", "Open streams.", self._calls.streams)
        refusals = {reason.value: count for reason, count in self._calls.refusals.counts.items()}
        yield _counters("refusals", "Calls and items refused, by reason.", "reason", refusals)


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """A registry with the executor's numbers and its process's."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return registry


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(PREFIX + name, text, labels=(label,)), values.items())


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _labelled(CounterMetricFamily(PREFIX + name, text, labels=(label,)), list(values.items()))


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    for label, value in values:
        family.add_metric((label,), value)
    return family


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), 1)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, total = histogram.snapshot()
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=total)

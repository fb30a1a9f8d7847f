"""How much work a worker has: figures for the router, and metrics for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from ferrum_rpc.client.fleet import Members
from ferrum_rpc.scheduler import Scheduler

PREFIX: Final = "ferrum_worker_"
RATE_S: Final = 5.0
"""Seconds over which the rate of tokens is averaged."""


@dataclass(eq=False)
class WorkLoad(Collector):
    """The work of one worker. ``requests``: texts that have not ended. ``calls``: ended calls by method and status.
    ``finished``: texts by the reason of their end. Tokens of prompts, of them found in a prefix cache, and chosen."""

    scheduler: Scheduler
    members: Members
    max_running: int
    max_waiting: int
    requests: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chosen_tokens: int = 0
    waiting_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    _rate: float = 0.0
    _rate_at: float = field(default_factory=time.monotonic)
    _rate_tokens: int = 0

    def count_call(self, method: str, code: str) -> None:
        """A call has ended."""
        self.calls[method, code] += 1

    @property
    def waiting(self) -> int:
        """Texts that wait for an executor."""
        return min(self.scheduler.waiting, self.requests)

    @property
    def max_texts(self) -> int:
        """Texts that may be held: those that run, wait, or have ended and are not read."""
        return self.max_running * max(1, len(self.members.serving)) + self.max_waiting

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def tokens_per_s(self) -> float:
        """Chosen tokens per second, over the last `RATE_S` seconds or more."""
        now = time.monotonic()
        if (passed := now - self._rate_at) >= RATE_S:
            self._rate = (self.chosen_tokens - self._rate_tokens) / passed
            self._rate_at, self._rate_tokens = now, self.chosen_tokens
        return self._rate

    def message(self) -> Any:
        """The figures of ``GetLoads``: those of all executors together."""
        pressures = [each.pressure for each in self.members.there if each.pressure is not None]
        total = sum(each.total_blocks * each.block_size for each in pressures)
        used = total - sum(each.free_blocks * each.block_size for each in pressures)
        waiting, running = self.waiting, self.requests - self.waiting
        slots = [0 if each.pressure is None else each.pressure.total_slots for each in self.members.serving]
        most = sum(min(self.max_running, each or self.max_running) for each in slots) or self.max_running
        return pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=self.requests,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / total if total else 0.0,
            gen_throughput=self.tokens_per_s(),
            cache_hit_rate=self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            utilization=running / most,
            max_running_requests=most,
            num_waiting_uncached_tokens=self.waiting_tokens if waiting else 0,
        )

    def collect(self) -> Iterator[Metric]:
        """The metrics; may be called by another thread."""
        calls = CounterMetricFamily(f"{PREFIX}calls", "Ended calls by method and status.", labels=("method", "code"))
        for key, count in list(self.calls.items()):
            calls.add_metric(key, count)
        yield calls
        finished = CounterMetricFamily(f"{PREFIX}texts", "Ended texts by the reason of their end.", labels=("reason",))
        for reason, count in list(self.finished.items()):
            finished.add_metric((reason,), count)
        yield finished
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were found in a prefix cache.", self.cached_tokens),
            ("chosen_tokens", "Tokens of texts.", self.chosen_tokens),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, gauge in (
            ("running", "Texts that run at an executor.", float(self.requests - self.waiting)),
            ("waiting", "Texts that wait for an executor.", float(self.waiting)),
            ("uptime_seconds", "Seconds since the start.", self.uptime_s),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=gauge)
        states = Counter(each.condition for each in self.members.there)
        executors = GaugeMetricFamily(f"{PREFIX}executors", "Executors by state.", labels=("state",))
        for state in ("serving", "draining", "hung"):
            executors.add_metric((state,), states[state])
        yield executors


def registry_of_worker(load: WorkLoad) -> CollectorRegistry:
    """A registry with the metrics of a worker and of its process."""
    registry = CollectorRegistry()
    registry.register(load)
    ProcessCollector(registry=registry)
    return registry

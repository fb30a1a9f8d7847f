"""The alerts of `deploy/kubernetes/alerts`: each fires and clears, by Prometheus' own arithmetic and for real."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from ruamel.yaml import YAML

from ferrum_rpc.client import ExecutorClient, tls
from ferrum_rpc.errors import KvBlocksExhausted, QueueFull, StepFailed, Unauthenticated
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.metrics_server import MetricsServer
from tests.e2e.test_ranks import free_port
from tests.exposition import fetch
from tests.faults.process import serving
from tests.unit.test_metrics import observed

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "kubernetes" / "alerts" / "prometheusrule.yaml"


def rules() -> dict[str, dict[str, Any]]:
    """By the name of the alert."""
    [group] = YAML(typ="safe", pure=True).load(FILE)["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def rule_file(folder: Path, shorten: Callable[[str], str] = lambda text: text) -> Path:
    """The rules as Prometheus reads them without an operator."""
    written = folder / "rules.yml"
    with written.open("w") as file:
        YAML(typ="safe", pure=True).dump(YAML(typ="safe", pure=True).load(shorten(FILE.read_text()))["spec"], file)
    return written


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH: apt-get install prometheus")
    return found


# --- what is written ------------------------------------------------------------------------------------------------


def test_ten_alerts_are_explained_with_what_to_do() -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    [table] = re.findall(r"^\| alert \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = {row.split("|")[1].strip(" `"): row.split("|")[2:-1] for row in table.splitlines()}
    assert set(rows) == set(rules()) and len(rows) == 10
    for name, rule in rules().items():
        severity, wait, means, do = (each.strip() for each in rows[name])
        assert (severity, wait) == (rule["labels"]["severity"], rule.get("for", "at once"))
        assert means and do
        assert set(rule["annotations"]) == {"summary", "description"} and "$labels" in rule["annotations"]["summary"]


def test_alerts_ask_for_metrics_that_an_executor_has() -> None:
    registry = observed()[-1]
    served = {sample.name for family in registry.collect() for sample in family.samples} | {"up"}
    for name, rule in rules().items():
        asked = set(re.findall(r"\b(?:ferrum_\w+|up)\b", re.sub(r'"[^"]*"', "", rule["expr"])))
        assert asked and asked <= served, name


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "rules", rule_file(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "SUCCESS: 10 rules found" in done.stdout, done.stdout + done.stderr


# --- by Prometheus' own arithmetic ----------------------------------------------------------------------------------


WEEK_S = 7 * 86400
MINUTES = 40
"""Each of three phases: it is nearly bad, it is bad, it is as before."""


class Case(NamedTuple):
    """``series``: what a series is in the first and third phase, and in the second; a counter grows by that much in a
    minute, None is no sample."""

    series: dict[str, tuple[float | None, float | None]]
    counter: bool = False


def refusals(reason: str, quiet: float, bad: float) -> Case:
    return Case({f'ferrum_refusals_total{{reason="{reason}"}}': (quiet, bad)}, counter=True)


def of_limit(name: str, quiet: float, bad: float) -> Case:
    return Case({name: (quiet, bad), f"{name}_limit": (100, 100)})


CASES: dict[str, list[Case]] = {
    "FerrumExecutorDown": [Case({"up": (1, 0), "ferrum_build_info": (1, None)})],
    "FerrumExecutorHung": [Case({'ferrum_executor_state{state="hung"}': (0, 1)})],
    "FerrumExecutorNotServing": [Case({'ferrum_health{check="ready"}': (1, 0)})],
    "FerrumExecutorErrors": [refusals(each, 0, 1) for each in ("INTERNAL_ERROR", "STEP_FAILED", "DEVICE_LOST")],
    "FerrumBackgroundFailure": [
        Case({f'ferrum_background_failures_total{{task="{task}"}}': (0, 1)}, counter=True)
        for task in ("sweep", "certificates")
    ],
    "FerrumCertificateExpires": [
        Case({'ferrum_certificate_expiry_timestamp_seconds{file="server"}': (WEEK_S + 9000, WEEK_S + 2000)})
    ],
    "FerrumQueueNearLimit": [of_limit("ferrum_queue_items", 80, 81), of_limit("ferrum_queue_tokens", 80, 81)],
    "FerrumCacheExhausted": [refusals("KV_BLOCKS_EXHAUSTED", 0, 1)],
    "FerrumTableNearLimit": [of_limit(f"ferrum_{name}", 90, 91) for name in ("sequences", "leases", "sessions")],
    "FerrumCallersUnauthenticated": [refusals("UNAUTHENTICATED", 59, 61)],
}
SILENT: dict[str, Case] = {
    "a target that is no executor": Case({"up": (1, 0)}),
    "a drain": Case({'ferrum_health{check="ready"}': (1, 0), 'ferrum_executor_state{state="draining"}': (0, 1)}),
    "a caller's own mistakes": refusals("INVALID_REQUEST", 0, 100),
    "an executor without a second tier": Case({"ferrum_sequences": (0, 0), "ferrum_sequences_limit": (0, 0)}),
}


def samples(case: Case, quiet: float | None, bad: float | None) -> str:
    """One a minute, as promtool reads them."""
    values, total = [], 0.0
    for phase in (quiet, bad, quiet):
        for _ in range(MINUTES):
            total += phase or 0
            values.append("_" if phase is None else f"{total if case.counter else phase:g}")
    return " ".join(values)


def expectations(alert: str | None, wait: str | None) -> list[dict[str, Any]]:
    """How many alerts fire, at the end of each phase; and that one that waits does so."""
    named = "" if alert is None else f'alertname="{alert}",'
    fires = 0 if alert is None else 1
    times = [(MINUTES - 1, 0), (2 * MINUTES - 1, fires), (3 * MINUTES - 1, 0)]
    if wait is not None and alert is not None:
        times.insert(1, (MINUTES, 0))
    expr = f'count(ALERTS{{{named}alertstate="firing"}}) or vector(0)'
    return [
        {"expr": expr, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
        for minute, value in times
    ]


def with_target(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f'{name}{{job="executors",instance="a:9464"{"," if brace else ""}{labels or "}"}'


def test_each_alert_fires_when_it_should_and_clears(tmp_path: Path) -> None:
    assert set(CASES) == set(rules())
    rule_file(tmp_path)
    wanted: list[tuple[str | None, Case]] = [(name, case) for name, cases in CASES.items() for case in cases]
    wanted += [(None, case) for case in SILENT.values()]
    tests = [
        {
            "name": f"{alert}: {list(case.series)}",
            "interval": "1m",
            "input_series": [
                {"series": with_target(series), "values": samples(case, *values)}
                for series, values in case.series.items()
            ],
            "promql_expr_test": expectations(alert, rules()[alert].get("for") if alert else None),
        }
        for alert, case in wanted
    ]
    (tmp_path / "tests.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})  # JSON is YAML
    )
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- for real -------------------------------------------------------------------------------------------------------

SHORTER = (
    (r"\bfor: \d+[sm]", "for: 1s"),  # how long it must be so
    (r"\[\d+m\]", "[4s]"),  # what is looked back at; [1d] stays
)
"""What of the rules the test with a real Prometheus replaces, so that it takes seconds."""

FIRES_S = 60.0
"""A few seconds on an idle machine."""

TOKENS = "scheduler the-token operator\n"


def shorten(text: str) -> str:
    for pattern, replacement in SHORTER:
        text, count = re.subn(pattern, replacement, text)
        assert count
    return text


class Prometheus:
    """A running one. ``url`` is of its API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        result: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return result

    def firing(self) -> set[str]:
        return {each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}


@asynccontextmanager
async def prometheus(folder: Path, *targets: str) -> AsyncIterator[Prometheus]:
    """Prometheus with the rules, scraping ``targets`` twice a second."""
    program, port = tool("prometheus"), free_port()
    rule_file(folder, shorten)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "executors", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    flags = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--log.level=error")
    process = await asyncio.create_subprocess_exec(program, *flags, "--storage.tsdb.path=data", cwd=folder)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(FIRES_S):
            while True:
                with suppress(OSError):
                    if len(await asyncio.to_thread(server.query, "up == 1")) == len(targets):
                        break
                await asyncio.sleep(0.1)
        yield server
    finally:
        process.kill()
        await process.wait()


async def until_alerts(server: Prometheus, wanted: set[str], *, fire: bool, seen: set[str] | None = None) -> None:
    """Wait until each of ``wanted`` has fired once, or until none of them does any more."""
    seen = set() if seen is None else seen
    try:
        async with asyncio.timeout(FIRES_S):
            while True:
                firing = await asyncio.to_thread(server.firing)
                seen |= firing
                if wanted <= seen if fire else not wanted & firing:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(
            f"{'not fired' if fire else 'still firing'}: {wanted - seen if fire else firing}"
        ) from None


def write_pair(authority: trustme.CA, folder: Path, days: float) -> None:
    """The server's certificate, each file in one piece."""
    leaf = authority.issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=days))
    for name, content in (("key", leaf.private_key_pem.bytes()), ("cert", leaf.cert_chain_pems[0].bytes())):
        (folder / f"new-{name}").write_bytes(content)
        (folder / f"new-{name}").chmod(0o600)
        (folder / f"new-{name}").replace(folder / name)


@contextmanager
def an_executor_that_may_not_serve() -> Iterator[tuple[str, dict[str, float]]]:
    """The metrics of an executor of which the test says whether it is ready: an identity model loads too fast."""
    state, calls, steps, _ = observed()
    health: dict[str, float] = {"ready": 1, "live": 1}
    server = MetricsServer(registry_of(Metrics(state, calls, steps, health=lambda: health)), "127.0.0.1", 0)
    try:
        yield urllib.parse.urlsplit(server.url).netloc, health
    finally:
        server.stop()


async def test_each_alert_fires_and_clears_in_a_real_prometheus(tmp_path: Path) -> None:
    """One executor, to which everything happens that alerts tell of; that one does not serve is told by another."""
    tool("prometheus")
    authority, folder = trustme.CA(), tmp_path / "secrets"
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca")
    write_pair(authority, folder, days=90)
    (folder / "tokens").write_text(TOKENS)
    (folder / "tokens").chmod(0o600)
    metrics_port = free_port()
    flags = [f"--metrics-port={metrics_port}", f"--tokens={folder / 'tokens'}"]
    flags += [f"--tls-cert={folder / 'cert'}", f"--tls-key={folder / 'key'}", "--max-sequences=2", "--block-size=16"]
    # the first step fails, the second one hangs for a while, with a queue of one item behind it
    failpoints = "before_commit=error@1;before_forward=delay:6000@2"
    flags += ["--max-queued-items=1", f"--failpoints={failpoints}"]
    credentials = tls(folder / "ca")
    async with AsyncExitStack() as stack:
        other, health = stack.enter_context(an_executor_that_may_not_serve())
        executor = await stack.enter_async_context(serving(*flags, kv_blocks=4))
        server = await stack.enter_async_context(prometheus(tmp_path, f"127.0.0.1:{metrics_port}", other))
        await until_alerts(server, set(rules()), fire=False)  # a scrape that came late may have been taken for an end

        def client(token: str) -> ExecutorClient:
            target = f"localhost:{executor.port}"
            return ExecutorClient(target, credentials=credentials, token=token, timeout_s=FIRES_S)

        scheduler = await stack.enter_async_context(client("the-token"))
        stranger = await stack.enter_async_context(client("another-token"))
        seen: set[str] = set()

        health["ready"] = 0
        write_pair(authority, folder, days=2)
        (folder / "tokens").write_text("no token here\n")
        with pytest.raises(StepFailed):
            await scheduler.sequence().prefill(range(20))
        sequences = [scheduler.sequence(), scheduler.sequence()]
        prefills = [asyncio.create_task(insist(each)) for each in sequences]
        enough = asyncio.Event()
        guessing = asyncio.create_task(guess(stranger, enough))
        early = {"FerrumExecutorErrors", "FerrumBackgroundFailure", "FerrumCertificateExpires"}
        early |= {"FerrumExecutorHung", "FerrumQueueNearLimit", "FerrumExecutorNotServing"}
        await until_alerts(server, early | {"FerrumCallersUnauthenticated"}, fire=True, seen=seen)
        await asyncio.gather(*prefills)

        begging = asyncio.create_task(beg(sequences[0], enough))
        await until_alerts(server, {"FerrumCacheExhausted", "FerrumTableNearLimit"}, fire=True, seen=seen)

        enough.set()
        await asyncio.gather(guessing, begging)
        for each in sequences:
            await each.release()
        health["ready"] = 1
        write_pair(authority, folder, days=90)
        (folder / "tokens").write_text(TOKENS)
        await until_alerts(server, set(rules()), fire=False)

        await executor.kill()
        await until_alerts(server, {"FerrumExecutorDown"}, fire=True, seen=seen)
        await stack.enter_async_context(serving(*flags, kv_blocks=4))
        await until_alerts(server, set(rules()), fire=False)
        assert seen == set(rules())


async def insist(sequence: Any) -> None:
    """Prefill as soon as the queue has room: the step that hangs must have taken the other first."""
    while True:
        with suppress(QueueFull):
            await sequence.prefill(range(20))
            return
        await asyncio.sleep(0.05)


async def guess(stranger: ExecutorClient, enough: asyncio.Event) -> None:
    """Show a wrong token, again and again."""
    while not enough.is_set():
        with pytest.raises(Unauthenticated):
            await stranger.status()
        await asyncio.sleep(0.05)


async def beg(sequence: Any, enough: asyncio.Event) -> None:
    """Ask for more blocks than there are, again and again."""
    while not enough.is_set():
        with pytest.raises(KvBlocksExhausted):
            await sequence.prefill(range(40))
        await asyncio.sleep(0.1)

"""The alerts and dashboards of `deploy`: each alert fires and clears by Prometheus' own arithmetic, and a real one over
two executors answers every query of a dashboard with a number."""

import asyncio
import itertools
import json
import math
import re
import shutil
import urllib.parse
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.errors import KvBlocksExhausted
from tests.e2e.test_ranks import free_port
from tests.support.exposition import fetch
from tests.support.process import serving
from tests.tools.running import ran, yaml
from tests.unit.test_metrics import observed
from tools.monitoring import FOLDER, files
from tools.monitoring import RULES as RULES_FILE
from tools.site.sources import page, rows

[GROUP] = yaml(RULES_FILE)["spec"]["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}


def tool(name):
    return shutil.which(name) or pytest.skip(f"no {name} on PATH: apt-get install prometheus")


# --- alerts -----------------------------------------------------------------------------------------------------------


def test_ten_alerts_are_explained_with_what_to_do():
    explained = {name.strip("`"): cells for name, *cells in rows(page("operations.md"), "alert")}
    assert set(explained) == set(RULES) and len(RULES) == 10
    for name, rule in RULES.items():
        severity, wait, means, do = explained[name]
        assert (severity, wait) == (rule["labels"]["severity"], rule.get("for", "at once"))
        assert means and do
        assert set(rule["annotations"]) == {"summary", "description"} and "$labels" in rule["annotations"]["summary"]


def test_alerts_ask_for_series_that_an_executor_has_before_anything_happened():
    """A counter that begins with its first event has not grown by it."""
    served = [sample for family in observed()[-1].collect() for sample in family.samples]
    names = {each.name for each in served} | {"up"}
    labelled = {(each.name, *label) for each in served for label in each.labels.items()}
    for name, rule in RULES.items():
        asked = set(re.findall(r"\b(?:ferrum_\w+|up)\b", re.sub(r'"[^"]*"', "", rule["expr"])))
        assert asked and asked <= names, name
        for metric, label, values in re.findall(r'(ferrum_\w+)\{(\w+)=~?"([^"]+)"\}', rule["expr"]):
            assert {(metric, label, each) for each in values.split("|")} <= labelled, name


WEEK_S = 7 * 86400
MINUTES = 40
"""Each of three phases: it is nearly bad, it is bad, it is as before."""


class Case(NamedTuple):
    """``series``: what a series is in the first and third phase, and in the second; a counter grows by that much in a
    minute, None is no sample."""

    series: dict[str, tuple[float | None, float | None]]
    counter: bool = False


def refusals(reason, quiet, bad):
    return Case({f'ferrum_refusals_total{{reason="{reason}"}}': (quiet, bad)}, counter=True)


def of_limit(name, quiet, bad):
    return Case({name: (quiet, bad), f"{name}_limit": (100, 100)})


CASES = {
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
SILENT = {
    "a target that is no executor": Case({"up": (1, 0)}),
    "a drain": Case({'ferrum_health{check="ready"}': (1, 0), 'ferrum_executor_state{state="draining"}': (0, 1)}),
    "a caller's own mistakes": refusals("INVALID_REQUEST", 0, 100),
    "an executor without a second tier": Case({"ferrum_sequences": (0, 0), "ferrum_sequences_limit": (0, 0)}),
}


def samples(case, quiet, bad):
    """One a minute, as promtool reads them."""
    values, total = [], 0.0
    for phase in (quiet, bad, quiet):
        for _ in range(MINUTES):
            total += phase or 0
            values.append("_" if phase is None else f"{total if case.counter else phase:g}")
    return " ".join(values)


def expectations(alert):
    """How many alerts fire, at the end of each phase; and that one that waits does so."""
    fire = {MINUTES - 1: 0, 2 * MINUTES - 1: 0 if alert is None else 1, 3 * MINUTES - 1: 0}
    if "for" in RULES.get(alert, ()):
        fire[MINUTES] = 0
    named = "" if alert is None else f'alertname="{alert}",'
    expr = f'count(ALERTS{{{named}alertstate="firing"}}) or vector(0)'
    return [
        {"expr": expr, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
        for minute, value in fire.items()
    ]


def with_target(series):
    name, brace, labels = series.partition("{")
    return f'{name}{{job="executors",instance="a:9464"{"," if brace else ""}{labels or "}"}'


def test_each_alert_fires_when_it_should_and_clears(tmp_path):
    assert set(CASES) == set(RULES)
    wanted = [(name, case) for name, cases in CASES.items() for case in cases]
    wanted += [(None, case) for case in SILENT.values()]
    tests = [
        {
            "name": f"{alert}: {list(case.series)}",
            "interval": "1m",
            "input_series": [
                {"series": with_target(series), "values": samples(case, *values)}
                for series, values in case.series.items()
            ],
            "promql_expr_test": expectations(alert),
        }
        for alert, case in wanted
    ]
    file = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(file))  # JSON is YAML
    done = ran([tool("promtool"), "test", "rules", "tests.yml"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# --- dashboards -------------------------------------------------------------------------------------------------------


RANGE = "4s"
"""What `$__rate_interval` becomes: some scrapes of the test's Prometheus."""
PATIENCE_S = 60.0
"""A few seconds on an idle machine."""


def queries(name):
    """Panel and query of each target in a dashboard's file, its variables replaced as by Grafana for "All"."""
    for panel in json.loads((FOLDER / "dashboards" / f"{name}.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", RANGE)
            query = re.sub(r"\$(job|instance)\b", ".*", query)
            assert not re.search(r"\$[a-z_{]", query), query
            yield panel["title"], query


def test_files_are_what_their_source_generates():
    assert {path for path, text in files().items() if path.read_bytes() != text} == set()


@pytest.mark.parametrize("name", ["executors", "fleet"])
def test_panels_fill_the_width_and_never_overlap(name):
    board = json.loads((FOLDER / "dashboards" / f"{name}.json").read_text())
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {*itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_prometheus_takes_its_configuration_and_the_rules():
    done = ran([tool("promtool"), "check", "config", str(FOLDER / "prometheus.yml")])
    assert done.returncode == 0 and "10 rules found" in done.stdout, done.stdout + done.stderr


async def test_every_query_is_answered_with_a_number(tmp_path):
    tool("prometheus")
    wanted = {query: f"{name}: {panel}" for name in ("executors", "fleet") for panel, query in queries(name)}
    assert len(wanted) > 60
    async with AsyncExitStack() as stack:
        ports = [free_port(), free_port()]
        executors = [await stack.enter_async_context(serving(f"--metrics-port={port}", kv_blocks=12)) for port in ports]
        server = await stack.enter_async_context(prometheus(tmp_path, *(f"127.0.0.1:{port}" for port in ports)))
        enough = asyncio.Event()
        clients = [
            await stack.enter_async_context(ExecutorClient(each.target, session=session))
            for session in (True, False)
            for each in executors
        ]
        working = asyncio.create_task(work(clients, enough))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while wanted and not working.done():
                    for query in list(wanted):
                        if await asyncio.to_thread(has_a_number, server, query):
                            del wanted[query]
        except TimeoutError:  # the assertion below names what has no number
            pass
        enough.set()
        await working
        assert not wanted


@asynccontextmanager
async def prometheus(folder, *targets):
    """Prometheus with the rules of the alerts, scraping ``targets`` twice a second; the address of its API."""
    program, port = tool("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": [{"job_name": "executors", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    flags = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--log.level=error")
    process = await asyncio.create_subprocess_exec(program, *flags, "--storage.tsdb.path=data", cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(OSError):
                    if len(await asyncio.to_thread(answer, url, "up == 1")) == len(targets):
                        break
                await asyncio.sleep(0.1)
        yield url
    finally:
        process.kill()
        await process.wait()


def answer(url, query):
    """The samples that a query finds."""
    found = fetch(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    return json.loads(found)["data"]["result"]


def has_a_number(url, query):
    """Whether the answer has a sample that a graph can draw."""
    return any(math.isfinite(float(sample["value"][1])) for sample in answer(url, query))


async def work(clients, enough):
    """What the panels show, again and again: prompts that are found and evicted, forks that are written to, drafts that
    are rolled back, transfers, refusals, handles of another executor."""
    for round_number in itertools.count():
        if enough.is_set():
            return
        for client, other in itertools.pairwise([*clients, clients[0]]):
            prompt = [round_number % 200 + 1] * 40
            for _ in range(2):
                async with client.sequence() as sequence:
                    await sequence.prefill(prompt)
                    await sequence.truncate(33)
                    [child] = await sequence.fork()
                    async with child:
                        await child.decode(7)
                        await sequence.decode(8)
            async with client.sequence() as sequence, other.sequence() as moved:
                await sequence.prefill(prompt)
                await sequence.move_to(moved)
            async with client.sequence() as sequence:
                with pytest.raises(KvBlocksExhausted):
                    await sequence.prefill([5] * 400)

"""What `deploy/kubernetes` promises, read from the files: their schemas, and what no schema knows."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from ruamel.yaml import YAML

from ferrum_rpc.cli import build_parser
from ferrum_rpc.config import SETTINGS, ServeSettings, load_settings, read_bytes, read_file
from ferrum_rpc.engine.ranks.world import World

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
WAYS = ("statefulset", "leaderworkerset")
COMPONENT, NAME = "app.kubernetes.io/component", "app.kubernetes.io/name"
LONGEST_STEP_S = 10.0


def read(path: Path) -> list[dict[str, Any]]:
    return [each for each in YAML(typ="safe", pure=True).load_all(path.read_text("utf-8")) if each]


def objects(way: str) -> list[dict[str, Any]]:
    """What a kustomization's files say, the generated map aside."""
    named = [DEPLOY / folder / name for folder in ("common", way) for name in kustomization(folder)["resources"]]
    return [each for path in named if path.suffix == ".yaml" for each in read(path)]


def kustomization(folder: str) -> dict[str, Any]:
    [found] = read(DEPLOY / folder / "kustomization.yaml")
    return found


def generated_map() -> dict[str, Any]:
    [found] = kustomization("common")["configMapGenerator"]
    return found


def one(way: str, kind: str, name: str | None = None) -> dict[str, Any]:
    [found] = [each for each in objects(way) if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


class Pod(NamedTuple):
    """A pod's template, and the one container in it."""

    template: dict[str, Any]
    spec: dict[str, Any]
    container: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def variables(self) -> dict[str, Any]:
        return {each["name"]: each for each in self.container["env"]}

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self.container["ports"]}

    def stop_s(self) -> float:
        [command, seconds] = self.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        return float(seconds)


def templates(document: dict[str, Any]) -> dict[str, Pod]:
    """The pods of a StatefulSet or of a LeaderWorkerSet, by who they are."""
    spec = document["spec"]
    if document["kind"] == "StatefulSet":
        found = {"executor": spec["template"]}
    else:
        group = spec["leaderWorkerTemplate"]
        found = {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}
    pods = {}
    for name, template in found.items():
        [container] = template["spec"]["containers"]
        pods[name] = Pod(template, template["spec"], container)
    return pods


STATEFUL = one("statefulset", "StatefulSet")
RANKS = one("leaderworkerset", "LeaderWorkerSet")
PODS = {**templates(STATEFUL), **templates(RANKS)}
ALL = pytest.mark.parametrize("who", list(PODS))
SERVING = pytest.mark.parametrize("who", ["executor", "leader"])


def settings(pod: Pod) -> ServeSettings:
    """What the pod's container serves, as the program would read it."""
    parsed = build_parser()[0].parse_args(pod.container["args"])
    assert parsed.command == "serve"
    assert parsed.config.name in generated_map()["files"]
    flags = {name: value for name, value in vars(parsed).items() if name in SETTINGS}
    return load_settings(parsed.model, flags, DEPLOY / "common" / parsed.config.name)


# --- schemas ------------------------------------------------------------------------------------------------------


def strict(schema: Any) -> Any:
    """A schema as a server with strict fields takes it: no property that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def check_set(document: dict[str, Any]) -> None:
    """Raises where a LeaderWorkerSet is not what its definition says; its pods aside."""
    [definition] = read(ROOT / "third_party" / "lws" / "leaderworkersets.yaml")
    [version] = definition["spec"]["versions"]
    assert document["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
    jsonschema.validate(document, strict(version["schema"]["openAPIV3Schema"]))


def check_kind(document: dict[str, Any]) -> None:
    """Raises where a document is not what Kubernetes 1.37 says; of a LeaderWorkerSet its pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    checked = [document]
    if document["kind"] == "LeaderWorkerSet":
        pods = templates(document).values()
        checked = [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod.template}
            for pod in pods
        ]
    for each in checked:
        validate(each, "1.37", strict=True)


def test_leader_worker_set_is_what_its_definition_says() -> None:
    check_set(RANKS)


@pytest.mark.parametrize("way", WAYS)
def test_files_are_what_their_schemas_say(way: str) -> None:
    assert len(objects(way)) >= 4
    for document in objects(way):
        check_kind(document)


@pytest.mark.parametrize(
    ("path", "check"),
    [
        ("spec", check_set),
        ("spec.leaderWorkerTemplate", check_set),
        ("spec.leaderWorkerTemplate.workerTemplate.spec", check_kind),
    ],
)
def test_a_word_that_does_not_exist_is_found(path: str, check: Callable[[dict[str, Any]], None]) -> None:
    broken = copy.deepcopy(RANKS)
    inner: Any = broken
    for part in path.split("."):
        inner = inner[part]
    inner["terminationGraceSeconds"] = 1
    with pytest.raises(Exception, match="terminationGraceSeconds"):
        check(broken)


def render(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in YAML(typ="safe", pure=True).load_all(done.stdout) if each]


def maps_named(document: Any) -> Iterator[str]:
    """Names of ConfigMaps, wherever a pod has one."""
    if isinstance(document, list):
        for each in document:
            yield from maps_named(each)
    elif isinstance(document, dict):
        for key, value in document.items():
            if key in ("configMap", "configMapKeyRef"):
                yield value["name"]
            else:
                yield from maps_named(value)


@pytest.mark.parametrize("way", WAYS)
def test_rendered_pods_name_the_map_that_was_generated(way: str) -> None:
    rendered = render(DEPLOY / way)
    [generated] = [each for each in rendered if each["kind"] == "ConfigMap"]
    assert re.fullmatch(r"ferrum-executor-\w{10}", generated["metadata"]["name"])
    assert generated["data"]["executor.toml"] == (DEPLOY / "common" / "executor.toml").read_text("utf-8")
    names = [name for each in rendered for name in maps_named(each)]
    assert len(names) == 2
    assert set(names) == {generated["metadata"]["name"]}


def test_the_overlay_of_the_docs_arrives(tmp_path: Path) -> None:
    """The example in docs/fleet.md: its image, model, number of executors, cores and namespace."""
    text = (ROOT / "docs" / "fleet.md").read_text("utf-8")
    [overlay] = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", text, re.DOTALL)
    shutil.copytree(DEPLOY, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    rendered = render(tmp_path / "mine")
    [found] = [each for each in rendered if each["kind"] == "StatefulSet"]
    assert (found["metadata"]["namespace"], found["spec"]["replicas"]) == ("qwen3", 8)
    [pod] = templates(found).values()
    assert pod.container["image"].startswith("registry.example/")
    assert pod.container["resources"]["limits"]["cpu"] == "16"
    [generated] = [each for each in rendered if each["kind"] == "ConfigMap"]
    assert generated["data"]["model"] == "/models/Qwen3-8B"
    assert "executor.toml" in generated["data"]
    for each in rendered:
        check_kind(each)


@pytest.mark.parametrize("way", WAYS)
def test_components_are_added_to_either_way(way: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "mine").mkdir()
    components = ["../deploy/gpu", "../deploy/alerts"]
    mine = {"namespace": "qwen3", "resources": [f"../deploy/{way}"], "components": components}
    images = [{"name": "ferrum-rpc/executor", "newName": "registry.example/executor"}]
    (tmp_path / "mine" / "kustomization.yaml").write_text(json.dumps(mine | {"images": images}))
    rendered = render(tmp_path / "mine")
    kinds = [each["kind"] for each in rendered]
    assert kinds.count("PrometheusRule") == 1 and not any(each["kind"] == "PrometheusRule" for each in objects(way))
    [found] = [each for each in rendered if each["kind"] in {"StatefulSet", "LeaderWorkerSet"}]
    if way == "leaderworkerset":
        check_set(found)
    for each in rendered:
        if each["kind"] != "PrometheusRule":
            check_kind(each)
    for who, pod in templates(found).items():
        limits, before = pod.container["resources"]["limits"], PODS[who].container["resources"]["limits"]
        assert limits == pod.container["resources"]["requests"]
        assert limits == before | {"nvidia.com/gpu": "1", "ephemeral-storage": "3Gi"}
        assert pod.container["image"] == "registry.example/executor:local-gpu"
        assert pod.variables["TRITON_CACHE_DIR"]["value"].startswith("/tmp/")
        if who != "worker":  # rank 0 tells it the device
            assert (
                load_settings("demo", {"device": pod.variables["FERRUM_DEVICE"]["value"]}, None).model.device == "cuda"
            )
        assert pod.spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert [each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each] == ["2Gi"]


# --- the code's own words -----------------------------------------------------------------------------------------


@SERVING
def test_ports_are_those_that_the_program_listens_on(who: str) -> None:
    pod = PODS[who]
    served = settings(pod)
    assert (served.host, served.metrics_host) == ("0.0.0.0", "0.0.0.0")  # noqa: S104
    assert (pod.ports["grpc"], pod.ports["metrics"]) == (served.port, served.metrics_port)
    scraped = {"scrape": "true", "port": str(served.metrics_port), "path": "/metrics"}
    assert pod.template["metadata"]["annotations"] == {f"prometheus.io/{key}": value for key, value in scraped.items()}


@SERVING
def test_arguments_and_variables_are_settings(who: str) -> None:
    pod = PODS[who]
    known = {f"FERRUM_{name.upper()}" for name in SETTINGS}
    assert {name for name in pod.variables if name.upper().startswith("FERRUM")} <= known
    assert settings(pod).model.path == "$(MODEL)"
    assert pod.variables["MODEL"]["valueFrom"]["configMapKeyRef"] == {"name": "ferrum-executor", "key": "model"}
    assert [each.partition("=")[0] for each in generated_map()["literals"]] == ["model"]
    assert pod.variables["FERRUM_THREADS"]["valueFrom"]["resourceFieldRef"]["containerName"] == pod.container["name"]


@SERVING
def test_probes_ask_the_health_of_the_port_that_is_served_with_the_ca_that_is_mounted(who: str) -> None:
    pod = PODS[who]
    parser, _ = build_parser()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod.container[name]
        program, *arguments = probe["exec"]["command"]
        asked = parser.parse_args(arguments)
        assert (program, asked.command) == ("ferrum-rpc", "health")
        assert asked.live == (name == "livenessProbe"), "one that drains is not ready, and is not to be ended for it"
        assert asked.target == f"localhost:{settings(pod).port}"
        assert asked.timeout < probe["timeoutSeconds"] < probe["periodSeconds"] + 1
        assert str(asked.tls_ca.parent) in {each["mountPath"] for each in pod.container["volumeMounts"]}
    starting = pod.container["startupProbe"]
    assert starting["periodSeconds"] * starting["failureThreshold"] >= 600  # a large model on a slow volume


@SERVING
def test_readiness_takes_one_late_probe_and_no_hang_for_long(who: str) -> None:
    readiness, liveness = PODS[who].container["readinessProbe"], PODS[who].container["livenessProbe"]
    assert readiness["failureThreshold"] == 2
    unready, ended = (
        each["failureThreshold"] * each["periodSeconds"] + each["timeoutSeconds"] for each in (readiness, liveness)
    )
    assert unready <= 25 < ended, "it leaves the Service before it is ended"


@ALL
def test_the_nodes_disk_has_room_for_what_a_pod_writes(who: str) -> None:
    pod = PODS[who]
    [tmp] = [each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each]
    logs = 50 * 2**20  # five files of 10 MiB, as the kubelet keeps them
    assert read_bytes("tmp", tmp) + logs <= read_bytes(
        "disk", pod.container["resources"]["limits"]["ephemeral-storage"]
    )


@SERVING
def test_a_drain_ends_before_the_kill(who: str) -> None:
    pod = PODS[who]
    grace = settings(pod).grace_s
    assert pod.spec["terminationGracePeriodSeconds"] >= pod.stop_s() + 2 * grace + LONGEST_STEP_S


def test_a_rank_may_live_as_long_as_its_leader() -> None:
    """It lets SIGTERM pass, and has nothing else that would end it."""
    leader, worker = PODS["leader"], PODS["worker"]
    assert worker.spec["terminationGracePeriodSeconds"] == leader.spec["terminationGracePeriodSeconds"]
    assert {"lifecycle", "livenessProbe", "readinessProbe", "startupProbe"}.isdisjoint(worker.container)


@SERVING
def test_secrets_and_settings_lie_where_the_settings_look(who: str) -> None:
    pod = PODS[who]
    served = settings(pod)
    mounted = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    secrets = {}
    for path in (served.tls_cert, served.tls_key, served.tokens):
        assert path is not None
        secrets[path.name] = volumes[mounted[str(path.parent)]]["secret"]["secretName"]
    assert secrets == {"tls.crt": "ferrum-tls", "tls.key": "ferrum-tls", "tokens": "ferrum-tokens"}
    assert not served.insecure
    config = pod.container["args"][pod.container["args"].index("--config") + 1]
    assert volumes[mounted[str(Path(config).parent)]]["configMap"]["name"] == "ferrum-executor"
    text = (ROOT / "docs" / "fleet.md").read_text("utf-8")
    for name in {*secrets.values(), "ferrum-models"}:
        assert name in text, name


@SERVING
def test_what_is_in_the_file_of_settings_is_not_said_twice(who: str) -> None:
    said = set(read_file(DEPLOY / "common" / "executor.toml"))
    assert not said & {name.removeprefix("FERRUM_").lower() for name in PODS[who].variables}
    assert not said & {each.removeprefix("--").replace("-", "_") for each in PODS[who].container["args"]}


# --- the objects of each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_labels_names_and_ports_are_those_that_others_select(way: str) -> None:
    serving = PODS["executor" if way == "statefulset" else "leader"]
    service = one(way, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= serving.labels.items()
    [port] = service["spec"]["ports"]
    assert port["port"] == serving.ports[port["targetPort"]]
    network = one(way, "NetworkPolicy", "ferrum-executor")
    assert {each["port"] for rule in network["spec"]["ingress"] for each in rule["ports"]} <= set(serving.ports)
    for selector in (one(way, "PodDisruptionBudget")["spec"]["selector"], network["spec"]["podSelector"]):
        for pod in (serving, PODS["worker"]):
            assert selector["matchLabels"].items() <= pod.labels.items()
    assert f"dns:///{service['metadata']['name']}:{port['port']}" in (ROOT / "docs" / "fleet.md").read_text("utf-8")


def test_a_stateful_set_selects_its_own_pods_by_its_own_service() -> None:
    spec, labels = STATEFUL["spec"], PODS["executor"].labels
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert spec["serviceName"] == one("statefulset", "Service")["metadata"]["name"]
    [spread] = PODS["executor"].spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_schedulers_reach_leaders_and_never_ranks() -> None:
    assert PODS["worker"].labels[COMPONENT] != one("leaderworkerset", "Service")["spec"]["selector"][COMPONENT]
    assert "ports" not in PODS["worker"].container
    # the controller makes a Service of the set's own name
    assert RANKS["metadata"]["name"] != one("leaderworkerset", "Service")["metadata"]["name"]
    own = one("leaderworkerset", "NetworkPolicy", "ferrum-ranks")["spec"]["podSelector"]["matchLabels"]
    assert own == {"leaderworkerset.sigs.k8s.io/name": RANKS["metadata"]["name"]}


def test_a_rank_may_ask_for_names_wherever_the_cluster_has_them() -> None:
    egress = one("leaderworkerset", "NetworkPolicy", "ferrum-ranks")["spec"]["egress"]
    [names] = [rule for rule in egress if "ports" in rule]
    assert {(each["port"], each["protocol"]) for each in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert [each["ipBlock"]["cidr"] for each in names["to"] if "ipBlock" in each] == ["169.254.20.10/32"]
    assert any("namespaceSelector" in each for each in names["to"])


def test_ranks_meet_by_what_the_controller_says() -> None:
    leader, worker = PODS["leader"], PODS["worker"]
    told = {
        "RANK": "$(LWS_WORKER_INDEX)",
        "WORLD_SIZE": "$(LWS_GROUP_SIZE)",
        "MASTER_ADDR": "$(LWS_LEADER_ADDRESS)",
        "MASTER_PORT": str(leader.ports["ranks"]),
    }
    size = RANKS["spec"]["leaderWorkerTemplate"]["size"]
    for rank, pod in enumerate((leader, worker)):
        values = {name: each.get("value") for name, each in pod.variables.items()}
        assert told.items() <= values.items()
        by_controller = {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": str(size), "LWS_LEADER_ADDRESS": "a.b.c"}
        given = {name: by_controller.get(values[name].strip("$()"), values[name]) for name in told}
        assert World.of(given) == (rank, size, "a.b.c", leader.ports["ranks"], False)
    model = settings(leader).model
    assert (model.ranks, model.trust_rank_network) == (size, True)
    parsed = build_parser()[0].parse_args(worker.container["args"])
    assert (parsed.command, parsed.trust_rank_network) == ("rank", True)
    models = {each["mountPath"] for each in worker.container["volumeMounts"] if each["name"] == "models"}
    assert models == {each["mountPath"] for each in leader.container["volumeMounts"] if each["name"] == "models"}
    assert RANKS["spec"]["startupPolicy"] == "LeaderCreated"  # a leader is ready only when its ranks are there
    assert RANKS["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupAfterStart"


@ALL
def test_pods_may_do_little(who: str) -> None:
    pod = PODS[who]
    assert pod.spec["enableServiceLinks"] is False  # FERRUM_* variables of Services are no settings
    assert pod.spec["automountServiceAccountToken"] is False
    outer, inner = pod.spec["securityContext"], pod.container["securityContext"]
    assert (outer["runAsNonRoot"], outer["runAsUser"], outer["fsGroup"]) == (True, 10001, 10001)
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    dropped = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert inner == dropped
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod.spec)
    assert {each["name"] for each in pod.container["volumeMounts"] if not each.get("readOnly")} == {"tmp"}
    assert {each["name"] for each in pod.container["volumeMounts"]} == {each["name"] for each in pod.spec["volumes"]}
    assert not any("subPath" in each for each in pod.container["volumeMounts"])  # or no rotation arrives
    assert pod.container["resources"]["requests"] == pod.container["resources"]["limits"]


def test_both_ways_start_the_same_executor() -> None:
    """What is said twice is said alike."""
    executor, leader = PODS["executor"], PODS["leader"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "volumeMounts", "resources", "image"):
        assert executor.container[name] == leader.container[name], name
    assert executor.spec["volumes"] == leader.spec["volumes"]
    assert leader.container["args"][: len(executor.container["args"])] == executor.container["args"]
    assert {each.container["image"] for each in PODS.values()} == {executor.container["image"]}

"""What `deploy/kubernetes` promises, read from the files: their schemas, and what no schema knows."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from ruamel.yaml import YAML

from ferrum_rpc.cli import build_parser
from ferrum_rpc.config import SETTINGS, load_settings, read_bytes
from ferrum_rpc.engine.ranks.world import World
from tools.commands import ROOT, run

DEPLOY = ROOT / "deploy" / "kubernetes"
WAYS = ("statefulset", "leaderworkerset")
COMPONENT = "app.kubernetes.io/component"
LONGEST_STEP_S = 10.0
FLEET_DOCS = (ROOT / "docs" / "fleet.md").read_text("utf-8")


def read(source):
    """The documents of a file or of a text."""
    return [each for each in YAML(typ="safe", pure=True).load_all(source) if each]


def kustomization(folder):
    [found] = read(DEPLOY / folder / "kustomization.yaml")
    return found


def objects(way):
    """What a kustomization's files say, the generated map aside."""
    named = [DEPLOY / folder / name for folder in ("common", way) for name in kustomization(folder)["resources"]]
    return [each for path in named if path.suffix == ".yaml" for each in read(path)]


[GENERATED_MAP] = kustomization("common")["configMapGenerator"]


def one(source, kind, name=None):
    """The object of a kind, of a way or of what was rendered."""
    given = objects(source) if isinstance(source, str) else source
    [found] = [each for each in given if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


class Pod(NamedTuple):
    """A pod's template, and the one container in it."""

    template: dict[str, Any]
    spec: dict[str, Any]
    container: dict[str, Any]

    @property
    def labels(self):
        return self.template["metadata"]["labels"]

    @property
    def variables(self):
        return {each["name"]: each for each in self.container["env"]}

    @property
    def mounts(self):
        return {each["mountPath"]: each for each in self.container["volumeMounts"]}

    @property
    def ports(self):
        return {each["name"]: each["containerPort"] for each in self.container["ports"]}


def templates(document):
    """The pods of a StatefulSet or of a LeaderWorkerSet, by who they are."""
    spec = document["spec"]
    if document["kind"] == "StatefulSet":
        found = {"executor": spec["template"]}
    else:
        group = spec["leaderWorkerTemplate"]
        found = {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}
    assert all(len(template["spec"]["containers"]) == 1 for template in found.values())
    return {name: Pod(each, each["spec"], each["spec"]["containers"][0]) for name, each in found.items()}


STATEFUL = one("statefulset", "StatefulSet")
RANKS = one("leaderworkerset", "LeaderWorkerSet")
PODS = {**templates(STATEFUL), **templates(RANKS)}
ALL = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
SERVING = pytest.mark.parametrize("pod", [PODS["executor"], PODS["leader"]], ids=["executor", "leader"])


def settings(pod):
    """What the pod's container serves, as the program would read it."""
    parsed = build_parser()[0].parse_args(pod.container["args"])
    assert parsed.command == "serve"
    assert parsed.config.name in GENERATED_MAP["files"]
    flags = {name: value for name, value in vars(parsed).items() if name in SETTINGS}
    return load_settings(parsed.model, flags, DEPLOY / "common" / parsed.config.name)


# --- schemas ------------------------------------------------------------------------------------------------------


def strict(schema):
    """A schema as a server with strict fields takes it: no property that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def check_set(document):
    """Raises where a LeaderWorkerSet is not what its definition says; its pods aside."""
    [definition] = read(ROOT / "third_party" / "lws" / "leaderworkersets.yaml")
    [version] = definition["spec"]["versions"]
    assert document["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
    jsonschema.validate(document, strict(version["schema"]["openAPIV3Schema"]))


def check_kind(document):
    """Raises where a document is not what Kubernetes 1.37 says; of a LeaderWorkerSet its pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    checked = [document]
    if document["kind"] == "LeaderWorkerSet":
        named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        checked = [named | {"template": pod.template} for pod in templates(document).values()]
    for each in checked:
        validate(each, "1.37", strict=True)


def test_a_leader_worker_set_is_what_its_definition_says_and_a_word_that_does_not_exist_is_found():
    check_set(RANKS)
    broken = copy.deepcopy(RANKS)
    broken["spec"]["leaderWorkerTemplate"]["terminationGraceSeconds"] = 1
    with pytest.raises(jsonschema.ValidationError, match="terminationGraceSeconds"):
        check_set(broken)


@pytest.mark.parametrize("way", WAYS)
def test_files_are_what_their_schemas_say(way):
    assert len(objects(way)) >= 4
    for document in objects(way):
        check_kind(document)


def render(folder):
    """What `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    return read(run(["kubectl", "kustomize", str(folder)]))


def test_the_overlay_of_the_docs_arrives(tmp_path):
    """The example in docs/fleet.md: its image, model, number of executors, cores and namespace."""
    [overlay] = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", FLEET_DOCS, re.DOTALL)
    shutil.copytree(DEPLOY, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    rendered = render(tmp_path / "mine")
    found = one(rendered, "StatefulSet")
    assert (found["metadata"]["namespace"], found["spec"]["replicas"]) == ("qwen3", 8)
    [pod] = templates(found).values()
    assert pod.container["image"].startswith("registry.example/")
    assert pod.container["resources"]["limits"]["cpu"] == "16"
    generated = one(rendered, "ConfigMap")
    assert generated["data"]["model"] == "/models/Qwen3-8B"
    assert "executor.toml" in generated["data"]
    for each in rendered:
        check_kind(each)


@pytest.mark.parametrize("way", WAYS)
def test_components_are_added_to_either_way(way, tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "mine").mkdir()
    components = ["../deploy/gpu", "../deploy/alerts"]
    mine = {"namespace": "qwen3", "resources": [f"../deploy/{way}"], "components": components}
    images = [{"name": "ferrum-rpc/executor", "newName": "registry.example/executor"}]
    (tmp_path / "mine" / "kustomization.yaml").write_text(json.dumps(mine | {"images": images}))
    rendered = render(tmp_path / "mine")
    one(rendered, "PrometheusRule")
    assert "PrometheusRule" not in {each["kind"] for each in objects(way)}
    generated = one(rendered, "ConfigMap")
    assert re.fullmatch(r"ferrum-executor-\w{10}", generated["metadata"]["name"])
    assert generated["data"]["executor.toml"] == (DEPLOY / "common" / "executor.toml").read_text("utf-8")
    named = re.findall(r'"configMap(?:KeyRef)?": {[^{}]*"name": "([^"]+)"', json.dumps(rendered))
    assert named == [generated["metadata"]["name"]] * 2
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
            device = pod.variables["FERRUM_DEVICE"]["value"]
            assert load_settings("demo", {"device": device}, None).model.device == "cuda"
        assert pod.spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert [each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each] == ["2Gi"]


# --- the code's own words -----------------------------------------------------------------------------------------


@SERVING
def test_ports_are_those_that_the_program_listens_on(pod):
    served = settings(pod)
    assert (served.host, served.metrics_host) == ("0.0.0.0", "0.0.0.0")  # noqa: S104
    assert (pod.ports["grpc"], pod.ports["metrics"]) == (served.port, served.metrics_port)
    scraped = {"scrape": "true", "port": str(served.metrics_port), "path": "/metrics"}
    assert pod.template["metadata"]["annotations"] == {f"prometheus.io/{key}": value for key, value in scraped.items()}


@SERVING
def test_arguments_and_variables_are_settings(pod):
    known = {f"FERRUM_{name.upper()}" for name in SETTINGS}
    assert {name for name in pod.variables if name.upper().startswith("FERRUM")} <= known
    assert settings(pod).model.path == "$(MODEL)"
    assert pod.variables["MODEL"]["valueFrom"]["configMapKeyRef"] == {"name": "ferrum-executor", "key": "model"}
    assert [each.partition("=")[0] for each in GENERATED_MAP["literals"]] == ["model"]
    assert pod.variables["FERRUM_THREADS"]["valueFrom"]["resourceFieldRef"]["containerName"] == pod.container["name"]


@SERVING
def test_probes_ask_the_health_that_is_served_and_leave_time_for_a_drain(pod):
    parser, _ = build_parser()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod.container[name]
        program, *arguments = probe["exec"]["command"]
        asked = parser.parse_args(arguments)
        assert (program, asked.command) == ("ferrum-rpc", "health")
        assert asked.live == (name == "livenessProbe"), "one that drains is not ready, and is not to be ended for it"
        assert asked.target == f"localhost:{settings(pod).port}"
        assert asked.timeout < probe["timeoutSeconds"] < probe["periodSeconds"] + 1
        assert str(asked.tls_ca.parent) in pod.mounts
    starting = pod.container["startupProbe"]
    assert starting["periodSeconds"] * starting["failureThreshold"] >= 600  # a large model on a slow volume
    probes = (pod.container["readinessProbe"], pod.container["livenessProbe"])
    hidden, ended = (each["failureThreshold"] * each["periodSeconds"] + each["timeoutSeconds"] for each in probes)
    assert hidden <= 25 < ended, "one that hangs leaves the Service before it is ended"
    [command, stop_s] = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drained_s = float(stop_s) + 2 * settings(pod).grace_s + LONGEST_STEP_S
    assert pod.spec["terminationGracePeriodSeconds"] >= drained_s


@ALL
def test_the_nodes_disk_has_room_for_what_a_pod_writes(pod):
    [tmp] = [each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each]
    logs = 50 * 2**20  # five files of 10 MiB, as the kubelet keeps them
    disk = pod.container["resources"]["limits"]["ephemeral-storage"]
    assert read_bytes("tmp", tmp) + logs <= read_bytes("disk", disk)


def test_a_rank_may_live_as_long_as_its_leader():
    """It lets SIGTERM pass, and has nothing else that would end it."""
    leader, worker = PODS["leader"], PODS["worker"]
    assert worker.spec["terminationGracePeriodSeconds"] == leader.spec["terminationGracePeriodSeconds"]
    assert {"lifecycle", "livenessProbe", "readinessProbe", "startupProbe"}.isdisjoint(worker.container)


@SERVING
def test_secrets_and_settings_lie_where_the_settings_look(pod):
    served = settings(pod)
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    mounted = {path: volumes[mount["name"]] for path, mount in pod.mounts.items()}
    paths = (served.tls_cert, served.tls_key, served.tokens)
    secrets = {path.name: mounted[str(path.parent)]["secret"]["secretName"] for path in paths}
    assert secrets == {"tls.crt": "ferrum-tls", "tls.key": "ferrum-tls", "tokens": "ferrum-tokens"}
    assert not served.insecure
    config = pod.container["args"][pod.container["args"].index("--config") + 1]
    assert mounted[str(Path(config).parent)]["configMap"]["name"] == "ferrum-executor"
    assert all(name in FLEET_DOCS for name in {*secrets.values(), "ferrum-models"})


# --- the objects of each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_labels_names_and_ports_are_those_that_others_select(way):
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
    assert f"dns:///{service['metadata']['name']}:{port['port']}" in FLEET_DOCS


def test_a_stateful_set_selects_its_own_pods_by_its_own_service():
    spec, labels = STATEFUL["spec"], PODS["executor"].labels
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert spec["serviceName"] == one("statefulset", "Service")["metadata"]["name"]
    [spread] = PODS["executor"].spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_schedulers_reach_leaders_and_never_ranks():
    assert PODS["worker"].labels[COMPONENT] != one("leaderworkerset", "Service")["spec"]["selector"][COMPONENT]
    assert "ports" not in PODS["worker"].container
    # the controller makes a Service of the set's own name
    assert RANKS["metadata"]["name"] != one("leaderworkerset", "Service")["metadata"]["name"]
    own = one("leaderworkerset", "NetworkPolicy", "ferrum-ranks")["spec"]["podSelector"]["matchLabels"]
    assert own == {"leaderworkerset.sigs.k8s.io/name": RANKS["metadata"]["name"]}


def test_ranks_meet_by_what_the_controller_says():
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
    [own], [leaders] = ([each for each in pod.mounts.values() if each["name"] == "models"] for pod in (worker, leader))
    assert own["mountPath"] == leaders["mountPath"]
    assert RANKS["spec"]["startupPolicy"] == "LeaderCreated"  # a leader is ready only when its ranks are there
    assert RANKS["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupAfterStart"


@ALL
def test_pods_may_do_little(pod):
    assert pod.spec["enableServiceLinks"] is False  # FERRUM_* variables of Services are no settings
    assert pod.spec["automountServiceAccountToken"] is False
    outer, inner = pod.spec["securityContext"], pod.container["securityContext"]
    assert (outer["runAsNonRoot"], outer["runAsUser"], outer["fsGroup"]) == (True, 10001, 10001)
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    dropped = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert inner == dropped
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod.spec)
    mounts = pod.container["volumeMounts"]
    assert {each["name"] for each in mounts if not each.get("readOnly")} == {"tmp"}
    assert {each["name"] for each in mounts} == {each["name"] for each in pod.spec["volumes"]}
    assert not any("subPath" in each for each in mounts)  # or no rotation arrives
    assert pod.container["resources"]["requests"] == pod.container["resources"]["limits"]


def test_both_ways_start_the_same_executor():
    """What is said twice is said alike."""
    executor, leader = PODS["executor"], PODS["leader"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "volumeMounts", "resources", "image"):
        assert executor.container[name] == leader.container[name], name
    assert executor.spec["volumes"] == leader.spec["volumes"]
    assert leader.container["args"][: len(executor.container["args"])] == executor.container["args"]
    assert {each.container["image"] for each in PODS.values()} == {executor.container["image"]}

"""What the container files promise, read from the files. What containers really do: `make compose-test`."""

import fnmatch
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from clients.scheduler.options import parse
from ferrum_rpc.cli import build_parser
from ferrum_rpc.config import ENV_PREFIX, SETTINGS, load_settings
from tests.tools.running import ran, yaml
from tools.commands import ROOT, Failed
from tools.compose_test import _served
from tools.wheels import collect_wheels, lists, normal

FILES = ("Dockerfile", ".dockerignore", "docker-compose.yml", "docker-compose.gpu.yml")
TEXTS = {name: (ROOT / name).read_text("utf-8") for name in FILES}


@cache
def compose(name="docker-compose.yml"):
    """The file with every variable at its default."""
    return yaml(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXTS[name]))


def service(name):
    """A service; ``worker``: the first of both."""
    return compose()["services"]["worker-1" if name == "worker" else name]


def instructions():
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", TEXTS["Dockerfile"], flags=re.MULTILINE)
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def stage(name):
    """The instructions of one stage."""
    _, *rest = itertools.dropwhile(lambda each: not each[1].endswith(f" AS {name}"), instructions())
    return list(itertools.takewhile(lambda each: each[0] != "FROM", rest))


def seconds(text):
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", ["executor", "scheduler", "worker"])
def test_a_service_may_do_little(name):
    made = service(name)
    assert made["read_only"] is True and all(mount["read_only"] is True for mount in made.get("volumes", []))
    assert all("noexec" in mount and "size=" in mount for mount in made["tmpfs"])
    assert (made["cap_drop"], made["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "cap_add", "pid", "ipc", "devices", "network_mode", "ports"} & set(made)
    assert made["user"] == "10001:10001" and ("USER", made["user"]) in stage(name)
    assert made["networks"] == ["rpc"] and compose()["networks"]["rpc"] == {"internal": True}
    limits = made["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    assert all(f"${{{name.upper()}_{kind.upper()}:-" in TEXTS["docker-compose.yml"] for kind in limits)


def test_image_and_compose_file_start_the_same_server_and_ask_its_health_by_commands_of_the_cli():
    executor, image = service("executor"), dict(stage("executor"))
    assert executor["command"] == json.loads(image["CMD"])
    parsed = build_parser()[0].parse_args(executor["command"])
    assert (parsed.command, parsed.model, parsed.host) == ("serve", "demo", "0.0.0.0")  # noqa: S104
    assert seconds(executor["stop_grace_period"]) >= SETTINGS["grace_s"].default + 10
    assert executor["environment"]["FERRUM_METRICS_PORT"] in executor["expose"]
    check, asked = executor["healthcheck"], image["HEALTHCHECK"]
    assert check["test"] == ["CMD", *json.loads(asked[asked.index("[") :])]
    assert f"--start-period={check['start_period']}" in asked
    health = build_parser()[0].parse_args(check["test"][2:])
    assert (check["test"][1], health.command) == ("ferrum-rpc", "health")
    assert health.timeout < seconds(check["timeout"])
    assert health.target.rpartition(":")[2] == executor["command"][-1]


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_every_variable_of_the_executor_is_one_of_its_settings(name):
    known = {f"{ENV_PREFIX}{field.upper()}" for field in SETTINGS}
    given = compose(name)["services"]["executor"]["environment"]
    assert {variable for variable in given if variable.startswith(ENV_PREFIX)} <= known


@pytest.mark.parametrize(
    ("name", "executors", "targets"),
    [
        ("scheduler", ["executor"], ["executor:50051"]),
        ("disaggregated", ["executor", "prefill"], ["executor:50051", "prefill:50051"]),
        ("fleet", ["fleet-1", "fleet-2", "fleet-3"], ["dns:///executors:50051"]),
    ],
)
def test_a_job_is_a_command_line_of_the_scheduler_and_waits_for_its_executors(name, executors, targets):
    job = service(name)
    given = parse(job["command"])
    assert [*given.targets, *given.prefill_targets] == targets
    assert job["depends_on"] == {each: {"condition": "service_healthy"} for each in executors}
    assert job["restart"] == "no"
    for each in map(service, executors):
        own = {key for key, value in each.items() if value != service("executor").get(key)}
        assert own <= {"profiles", "networks", "environment"}
        assert name != "fleet" or each["networks"] == {"rpc": {"aliases": ["executors"]}}


def test_a_job_is_done_when_all_of_its_requests_are_served():
    summary = "[1] 3 tokens, length: In\n\nrequests       8 of {}\ngenerated      1,920 tokens\n"
    assert _served(summary.format(8)) == "8 of 8 requests, 1,920 tokens"
    for wrong in (summary.format(9), "[1] 3 tokens, length: In\n"):
        with pytest.raises(Failed):
            _served(wrong)


def test_the_gpu_file_adds_a_device_a_compiler_and_a_place_for_kernels_and_takes_no_protection_away():
    """Triton finds a compiler, and one place that may execute and is kept. Docker gives an empty volume the owner and
    mode of the image's folder, which must be the user's."""
    file, executor = compose("docker-compose.gpu.yml"), service("executor")
    [(name, gpu)] = file["services"].items()
    assert name == "executor"
    assert set(gpu) == {"image", "build", "environment", "shm_size", "volumes", "deploy"}
    assert "reservations" not in executor["deploy"]["resources"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    devices = [each["environment"]["FERRUM_DEVICE"] for each in (executor, gpu)]
    assert [load_settings("demo", {"device": each}, None).model.device for each in devices] == ["cpu", "cuda"]
    assert gpu["build"] == {"args": {"BASE_IMAGE": executor["build"]["args"]["BUILD_IMAGE"], "COMPILES": "yes"}}
    folder = gpu["environment"]["TRITON_CACHE_DIR"]
    [volume] = gpu["volumes"]
    assert volume == {"type": "volume", "source": "kernels", "target": folder} and "kernels" in file["volumes"]
    user, group = executor["user"].split(":")
    [made] = [rest for what, rest in stage("executor") if what == "RUN" and rest.endswith(folder)]
    assert made == f"install -d -o {user} -g {group} -m 0700 {folder}"
    assert not any(mount["target"] == folder for mount in executor["volumes"])


def compiles(tmp_path, compiler, wanted="yes"):
    """The exit status of the Dockerfile's check, on a machine with or without a compiler."""
    [check] = [rest for what, rest in stage("executor") if what == "RUN" and "COMPILES" in rest]
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    python = bin_ / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for tool in ("rm", *(("gcc", "as", "ld") if compiler else ())):
        (bin_ / tool).symlink_to(str(shutil.which(tool)))
    check = check.replace("/tmp/probe.so", str(tmp_path / "probe.so"))
    return ran(["/bin/sh", "-c", check], env={"PATH": str(bin_), "COMPILES": wanted}).returncode


def test_the_image_for_gpus_is_not_built_without_a_compiler(tmp_path):
    for name, compiler, wanted, fails in (("a", False, "yes", True), ("b", False, "no", False)):
        (tmp_path / name).mkdir()
        assert (compiles(tmp_path / name, compiler, wanted) != 0) is fails
    if shutil.which("gcc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("this machine has no C compiler with Python's headers")
    (tmp_path / "c").mkdir()
    assert compiles(tmp_path / "c", compiler=True) == 0


def test_images_to_build_from_are_arguments_with_the_same_pinned_defaults_everywhere():
    defaults = {"BASE_IMAGE": "python:3.11-slim-bookworm", "BUILD_IMAGE": "python:3.11-bookworm"}
    for name, image in defaults.items():
        (argument,) = [rest for what, rest in instructions() if what == "ARG" and rest.startswith(f"{name}=")]
        assert argument == f"{name}={image}"
        assert {service(each)["build"]["args"][name] for each in ("executor", "scheduler")} == {image}
    roots = {rest.split()[0] for what, rest in instructions() if what == "FROM"}
    stages = {rest.split()[-1] for what, rest in instructions() if what == "FROM"}
    assert roots - stages == {"${BASE_IMAGE}", "${BUILD_IMAGE}"}


def test_every_package_is_installed_by_its_hash():
    installs = [rest for what, rest in instructions() if what == "RUN" and "pip install" in rest]
    assert len(installs) == 5
    ours = [rest for rest in installs if "--require-hashes --only-binary=:all: -r " not in rest]
    assert len(ours) == 1
    assert "--no-index --no-deps --no-build-isolation --target /app ." in ours[0]
    assert "--target /server ./ferrum_rpc_kernels ./ferrum_rpc_demo" in ours[0]
    named = {f"{name}.txt" for rest in installs for name in re.findall(r"-r (\w+)\.txt", rest)}
    assert named == {path.name for path in (ROOT / "locked").iterdir()}


@pytest.mark.parametrize("name", ["executor", "scheduler", "worker", "build"])
def test_what_is_locked_is_what_the_constraints_say(name):
    constraints = re.findall(r"^([^#\s]\S*?)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {normal(package): version for package, version in constraints}
    text = (ROOT / "locked" / f"{name}.txt").read_text()
    releases = re.findall(r"^([\w.-]+)==([^ ;]+)(.*(?:\n +--hash=sha256:[0-9a-f]{64}.*)*)", text, re.MULTILINE)
    assert releases
    for package, version, rest in releases:
        assert "--hash=sha256:" in rest, package
        assert pinned.get(normal(package), version) == version, package


def test_wheels_that_were_collected_are_listed_by_their_own_hashes(tmp_path):
    names = ("numpy-2.4.6-py3.whl", "torch-2.13.0+cpu-py3.whl", "pydantic_core-2.5-py3.whl", "setuptools-84-py3.whl")
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    made = lists(list(tmp_path.iterdir()))
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert made["build.txt"] == f"setuptools==84 --hash=sha256:{hashes[names[3]]}\n"
    assert made["scheduler.txt"] == f"numpy==2.4.6 --hash=sha256:{hashes[names[0]]}\n"
    assert f"torch==2.13.0+cpu --hash=sha256:{hashes[names[1]]}\n" in made["executor.txt"]
    assert "pydantic_core==2.5 " in made["executor.txt"]
    assert "nvidia" not in made["executor.txt"]


def test_a_python_without_pip_is_not_taken_for_one_whose_pip_is_not_configured(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr("tools.wheels.WHEELS", tmp_path / "none")
    assert "this Python has no pip" in collect_wheels()


def test_dockerfile_needs_no_buildkit():
    assert "syntax=" not in TEXTS["Dockerfile"].splitlines()[0]
    for what, rest in instructions():
        assert "<<" not in rest, f"a here-document: {what} {rest}"
        assert not re.match(r"--(mount|chmod|link|network|security|exclude|parents)\b", rest), f"{what} {rest}"


def test_build_context_is_what_the_dockerfile_copies_and_nothing_else():
    lines = [line for line in TEXTS[".dockerignore"].splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for what, rest in instructions()
        if what == "COPY" and "--from=" not in rest
        for source in rest.split()[:-1]
    }
    assert all(any(fnmatch.fnmatch(name, source) for source in copied) for name in sent)
    assert all(any(fnmatch.fnmatch(name, source) for name in sent) for source in copied)
    assert all((ROOT / name).exists() for name in sent - {"build/wheels"})
    assert "**/__pycache__" in lines


@pytest.mark.parametrize("name", [*FILES, "tools/compose_test.py", "tools/wheels.py"])
def test_no_file_names_a_registry_host_or_a_folder_of_some_machine(name):
    text = (ROOT / name).read_text("utf-8").replace("http://127.0.0.1:", "")
    assert not re.search(r"https?://|\b[\w-]+\.(io|com|org|dev|net)/|/home/|/work/|/opt/(?!venv)", text)


def test_compose_test_skips_visibly_without_an_engine(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = ran([sys.executable, "-m", "tools.compose_test"], cwd=ROOT, env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith("compose-test: SKIPPED: no `docker` command")


def test_compose_test_fails_where_something_does_not_hold(tmp_path):
    """An engine that answers, and cannot build: never a skip, never a pass."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncase "$*" in info|"compose version"|*" down "*) exit 0;; esac\necho no >&2; exit 7\n')
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = "import sys, tools.compose_test as test; test.collect_wheels = lambda: 'none'; sys.exit(test.main())"
    done = ran([sys.executable, "-c", script], env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1, done
    assert "compose-test: FAILED at build" in done.stdout

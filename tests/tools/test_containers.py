"""What the container files promise, read from the files. What containers really do: `make compose-test`."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clients.scheduler.options import parse
from ferrum_rpc.cli import build_parser
from ferrum_rpc.config import ENV_PREFIX, SETTINGS
from tools.compose_test import FLEET, texts_of
from tools.wheels import lists, normal

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", ".dockerignore", "docker-compose.yml", "docker-compose.gpu.yml")
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
SERVICES = pytest.mark.parametrize("name", ["executor", "scheduler", "worker"])


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    """The file with every variable at its default."""
    text = DEFAULT.sub(r"\1", (ROOT / name).read_text("utf-8"))
    loaded: dict[str, Any] = copy.deepcopy(YAML(typ="safe", pure=True).load(text))
    return loaded


def service(name: str) -> dict[str, Any]:
    """A service; ``worker``: the first of both."""
    found: dict[str, Any] = compose()["services"]["worker-1" if name == "worker" else name]
    return found


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage."""
    every = instructions()
    starts = [index for index, (what, _) in enumerate(every) if what == "FROM"]
    for start, end in zip(starts, [*starts[1:], len(every)], strict=True):
        if every[start][1].endswith(f" AS {name}"):
            return every[start:end]
    raise AssertionError(f"no stage {name}")


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@SERVICES
def test_root_filesystem_is_read_only_and_tmp_runs_no_programs(name: str) -> None:
    assert service(name)["read_only"] is True
    assert all("noexec" in mount and "size=" in mount for mount in service(name)["tmpfs"])
    assert all(mount["read_only"] is True for mount in service(name).get("volumes", []))


@SERVICES
def test_no_capability_and_none_to_be_gained(name: str) -> None:
    assert service(name)["cap_drop"] == ["ALL"]
    assert service(name)["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "devices", "network_mode"} & set(service(name))


@SERVICES
def test_user_is_not_root_by_file_and_by_image(name: str) -> None:
    assert service(name)["user"] == "10001:10001"
    assert ("USER", "10001:10001") in stage(name)


@SERVICES
def test_network_is_internal_and_the_host_has_no_port(name: str) -> None:
    assert service(name)["networks"] == ["rpc"]
    assert "ports" not in service(name)
    assert compose()["networks"]["rpc"] == {"internal": True}


@SERVICES
def test_memory_processors_and_processes_are_limited_by_variables(name: str) -> None:
    limits = service(name)["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    for kind in limits:
        assert f"${{{name.upper()}_{kind.upper()}:-" in text


def test_health_is_asked_in_python_with_a_command_that_the_cli_knows() -> None:
    test = service("executor")["healthcheck"]["test"]
    assert test[:2] == ["CMD", "ferrum-rpc"]
    asked = build_parser()[0].parse_args(test[2:])
    command = dict(stage("executor"))["CMD"]
    assert asked.command == "health"
    assert asked.timeout < seconds(service("executor")["healthcheck"]["timeout"])
    assert asked.target.rpartition(":")[2] == json.loads(command)[-1]


def test_image_and_compose_file_ask_the_same_health() -> None:
    asked = dict(stage("executor"))["HEALTHCHECK"]
    assert json.loads(asked[asked.index("[") :]) == service("executor")["healthcheck"]["test"][1:]
    assert f"--start-period={service('executor')['healthcheck']['start_period']}" in asked


def test_image_and_compose_file_start_the_same_server() -> None:
    command = service("executor")["command"]
    assert command == json.loads(dict(stage("executor"))["CMD"])
    parsed = build_parser()[0].parse_args(command)
    assert (parsed.command, parsed.model, parsed.host) == ("serve", "demo", "0.0.0.0")  # noqa: S104


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_every_variable_of_the_executor_is_one_of_its_settings(name: str) -> None:
    known = {f"{ENV_PREFIX}{field.upper()}" for field in SETTINGS}
    given = compose(name)["services"]["executor"]["environment"]
    assert {variable for variable in given if variable.startswith(ENV_PREFIX)} <= known


def test_metrics_are_on_the_network_of_the_stack_and_not_on_the_host() -> None:
    executor = service("executor")
    assert executor["environment"]["FERRUM_METRICS_PORT"] in executor["expose"]
    assert "ports" not in executor


def test_engine_waits_longer_than_the_calls_in_flight_may_take() -> None:
    grace = SETTINGS["grace_s"].default
    assert seconds(service("executor")["stop_grace_period"]) >= grace + 10


def test_scheduler_is_a_job_that_waits_for_a_healthy_executor() -> None:
    job = service("scheduler")
    assert job["depends_on"] == {"executor": {"condition": "service_healthy"}}
    assert job["restart"] == "no"
    assert job["profiles"] == ["job"]
    assert job["command"][:2] == ["--target", "executor:50051"]


def test_second_executor_is_as_the_first_and_its_job_waits_for_both() -> None:
    profile = ["disaggregated"]
    assert service("prefill") == {**service("executor"), "profiles": profile}
    job = service("disaggregated")
    command = ["--target", "executor:50051", "--prefill-target", "prefill:50051", *service("scheduler")["command"][2:]]
    healthy = {"condition": "service_healthy"}
    waits = {"profiles": profile, "command": command, "depends_on": {"executor": healthy, "prefill": healthy}}
    assert job == {**service("scheduler"), **waits}


def test_three_executors_share_a_name_and_their_job_waits_for_all() -> None:
    profile, healthy = ["fleet"], {"condition": "service_healthy"}
    named = {"rpc": {"aliases": ["executors"]}}
    environment = {**service("executor")["environment"], "FERRUM_THREADS": "1"}
    own = {"profiles": profile, "networks": named, "environment": environment}
    for name in FLEET:
        assert service(name) == {**service("executor"), **own}
    job = service("fleet")
    assert job["command"][:2] == ["--target", "dns:///executors:50051"]
    assert parse(job["command"]).bypass
    waits = {"profiles": profile, "command": job["command"], "depends_on": dict.fromkeys(FLEET, healthy)}
    assert job == {**service("scheduler"), **waits}


def test_texts_are_read_whatever_the_order_and_whoever_died() -> None:
    alone = "[1] 3 tokens, length: In the\n beginning\n[2] 2 tokens, end of text: And [so] on\n\nrequests  2 of 2\n"
    fleet = (
        "[executor] 10.0.0.3:50051 is gone\n[2] 2 tokens, end of text, rebuilt 1×: And [so] on\n"
        "[executor] 10.0.0.3:50051 is there\n[1] 3 tokens, length: In the\n beginning\n\nrequests  2 of 2\n"
    )
    assert texts_of(alone) == texts_of(fleet) == {"1": " In the\n beginning", "2": " And [so] on"}


def test_processor_by_default_and_the_gpu_only_by_the_gpu_file() -> None:
    assert service("executor")["environment"]["FERRUM_DEVICE"] == "cpu"
    assert "reservations" not in service("executor")["deploy"]["resources"]
    gpu = compose("docker-compose.gpu.yml")["services"]["executor"]
    assert gpu["environment"]["FERRUM_DEVICE"] == "cuda"
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_gpu_file_takes_no_protection_away() -> None:
    gpu = compose("docker-compose.gpu.yml")["services"]
    assert set(gpu) == {"executor"}
    assert set(gpu["executor"]) == {"image", "build", "environment", "shm_size", "volumes", "deploy"}


def test_on_a_gpu_triton_finds_a_compiler_and_one_place_that_may_execute_and_is_kept() -> None:
    """Docker gives an empty volume the owner and mode of the image's folder, which must be the user's."""
    file = compose("docker-compose.gpu.yml")
    gpu = file["services"]["executor"]
    base = service("executor")["build"]["args"]["BUILD_IMAGE"]
    assert gpu["build"] == {"args": {"BASE_IMAGE": base, "COMPILES": "yes"}}
    folder = gpu["environment"]["TRITON_CACHE_DIR"]
    [volume] = gpu["volumes"]
    assert volume == {"type": "volume", "source": "kernels", "target": folder} and "kernels" in file["volumes"]
    user, group = service("executor")["user"].split(":")
    [made] = [rest for what, rest in stage("executor") if what == "RUN" and rest.endswith(folder)]
    assert made == f"install -d -o {user} -g {group} -m 0700 {folder}"
    assert not any(mount["target"] == folder for mount in service("executor")["volumes"])


def test_ranks_on_gpus_have_shared_memory_for_nccl() -> None:
    assert compose("docker-compose.gpu.yml")["services"]["executor"]["shm_size"] == "1g"


def compiles(tmp_path: Path, compiler: bool, wanted: str = "yes") -> int:
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
    environment = {"PATH": str(bin_), "COMPILES": wanted}
    return subprocess.run(["/bin/sh", "-c", check], env=environment, capture_output=True, check=False).returncode


def test_the_image_for_gpus_is_not_built_without_a_compiler(tmp_path: Path) -> None:
    for name, compiler, wanted, fails in (("a", False, "yes", True), ("b", False, "no", False)):
        (tmp_path / name).mkdir()
        assert (compiles(tmp_path / name, compiler, wanted) != 0) is fails
    if shutil.which("gcc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("this machine has no C compiler with Python's headers")
    (tmp_path / "c").mkdir()
    assert compiles(tmp_path / "c", compiler=True) == 0


def test_images_to_build_from_are_arguments_with_the_same_pinned_defaults_everywhere() -> None:
    defaults = {"BASE_IMAGE": "python:3.11-slim-bookworm", "BUILD_IMAGE": "python:3.11-bookworm"}
    for name, image in defaults.items():
        (argument,) = [rest for what, rest in instructions() if what == "ARG" and rest.startswith(f"{name}=")]
        assert argument == f"{name}={image}"
        assert {service(each)["build"]["args"][name] for each in ("executor", "scheduler")} == {image}
    roots = {rest.split()[0] for what, rest in instructions() if what == "FROM"}
    stages = {rest.split()[-1] for what, rest in instructions() if what == "FROM"}
    assert roots - stages == {"${BASE_IMAGE}", "${BUILD_IMAGE}"}


def test_every_package_is_installed_by_its_hash() -> None:
    installs = [rest for what, rest in instructions() if what == "RUN" and "pip install" in rest]
    assert len(installs) == 5
    ours = [rest for rest in installs if "--require-hashes --only-binary=:all: -r " not in rest]
    assert len(ours) == 1
    assert "--no-index --no-deps --no-build-isolation --target /app ." in ours[0]
    assert "--target /server ./ferrum_rpc_kernels ./ferrum_rpc_demo" in ours[0]
    named = {f"{name}.txt" for rest in installs for name in re.findall(r"-r (\w+)\.txt", rest)}
    assert named == {path.name for path in (ROOT / "locked").iterdir()}


@pytest.mark.parametrize("name", ["executor", "scheduler", "worker", "build"])
def test_what_is_locked_is_what_the_constraints_say(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}
    text = (ROOT / "locked" / f"{name}.txt").read_text()
    releases = re.findall(r"^([\w.-]+)==([^ ;]+)(.*(?:\n +--hash=sha256:[0-9a-f]{64}.*)*)", text, re.MULTILINE)
    assert releases
    for package, version, rest in releases:
        assert "--hash=sha256:" in rest, package
        if normal(package) in pinned:
            assert pinned[normal(package)].partition("==")[2] == version, package


def test_wheels_that_were_collected_are_listed_by_their_own_hashes(tmp_path: Path) -> None:
    names = (
        "numpy-2.4.6-py3.whl",
        "torch-2.13.0+cpu-py3.whl",
        "pydantic_core-2.5-py3.whl",
        "setuptools-84-py3.whl",
    )
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    made = lists(list(tmp_path.iterdir()))
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert made["build.txt"] == f"setuptools==84 --hash=sha256:{hashes[names[3]]}\n"
    assert made["scheduler.txt"] == f"numpy==2.4.6 --hash=sha256:{hashes[names[0]]}\n"
    assert f"torch==2.13.0+cpu --hash=sha256:{hashes[names[1]]}\n" in made["executor.txt"]
    assert "pydantic_core==2.5 " in made["executor.txt"]
    assert "nvidia" not in made["executor.txt"]


def test_kernels_and_demo_models_are_in_the_executor_alone() -> None:
    def taken(name: str) -> set[str]:
        return {rest.split()[1] for what, rest in stage(name) if what == "COPY" and "--from=code" in rest}

    assert taken("executor") == {"/app", "/server"}
    assert taken("scheduler") == {"/app", "/clients"}
    assert taken("worker") == {"/app"}


def test_dockerfile_needs_no_buildkit() -> None:
    assert "syntax=" not in (ROOT / "Dockerfile").read_text("utf-8").splitlines()[0]
    for what, rest in instructions():
        assert "<<" not in rest, f"a here-document: {what} {rest}"
        assert not re.match(r"--(mount|chmod|link|network|security|exclude|parents)\b", rest), f"{what} {rest}"


def test_build_context_is_what_the_dockerfile_copies_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
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
def test_no_file_names_a_registry_host_or_a_folder_of_some_machine(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    text = text.replace("http://127.0.0.1:", "")
    assert not re.search(r"https?://|\b[\w-]+\.(io|com|org|dev|net)/|/home/|/work/|/opt/(?!venv)", text)


def test_compose_test_skips_visibly_without_an_engine(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tools.compose_test"]
    done = subprocess.run(
        script, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("compose-test: SKIPPED: no `docker` command")


def test_compose_test_fails_where_something_does_not_hold(tmp_path: Path) -> None:
    """An engine that answers, and cannot build: never a skip, never a pass."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncase "$*" in info|"compose version"|*" down "*) exit 0;; esac\necho no >&2; exit 7\n')
    docker.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = "import sys, tools.compose_test as test; test.collect_wheels = lambda: 'none'; sys.exit(test.main())"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert "compose-test: FAILED at build" in done.stdout

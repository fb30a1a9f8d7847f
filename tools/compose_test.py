"""Build the images, run the stack, and hold the containers to what docker-compose.yml says about them.

`make compose-test`. It asks the running containers, not the files: the executor is healthy and has no way out, a
scheduler job runs through, the root filesystem refuses writes, no process has a capability, SIGTERM ends with status 0,
nothing is left behind. Before the stack is asked, the same questions go to a container that has none of this: a probe
that finds nothing wrong there proves nothing.

Without a Docker engine it says SKIPPED and why, with exit status 0. A failed check is exit status 1.

Packages: where pip is configured on this machine (an index or a folder of its own), an image build knows nothing of it.
Then the wheels are collected here first, into build/wheels/, and the build needs no network; `--wheels` does only that,
for an engine that is kept away from the network. `BASE_IMAGE`, `EXECUTOR_MODEL` and every other variable of
docker-compose.yml apply.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"
PROJECT = "ferrum-compose-test"
IMAGES = {"EXECUTOR_IMAGE": "ferrum-rpc/executor:compose-test", "SCHEDULER_IMAGE": "ferrum-rpc/scheduler:compose-test"}
IMAGE_PYTHON = "3.11"
DEFAULT_BUILD = "python:3.11-bookworm"
DEFAULT_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/base:bookworm"
"""What a machine without a registry makes by `debootstrap | docker import`; used where the engine has only this one."""
PIP_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
UP_TIMEOUT_S = 180

PROBE = r"""
import importlib.util, json, os
from pathlib import Path

status = dict(line.split(":", 1) for line in Path("/proc/1/status").read_text().splitlines() if ":" in line)
writable = []
for folder in ("/", "/app", "/dev", "/etc", "/models", "/opt", "/opt/venv", "/root", "/sys", "/usr/bin", "/var/tmp"):
    try:
        Path(folder, ".probe").write_text("")
        writable.append(folder)
    except OSError:
        pass
script = Path("/tmp/probe")
script.write_text("#!/bin/sh\n")
script.chmod(0o755)
try:
    os.posix_spawn(str(script), [str(script)], {})
    runs = True
except OSError:
    runs = False
script.unlink()
print(json.dumps({
    "uids": status["Uid"].split(), "gids": status["Gid"].split(), "groups": status["Groups"].split(),
    "capabilities": {name: status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
    "no_new_privileges": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
    "writable": writable, "tmp_runs_programs": runs,
    "torch": importlib.util.find_spec("torch") is not None, "pip": importlib.util.find_spec("pip") is not None,
}))
"""
NO_CAPABILITIES = "0" * 16
FAULTS = 6
"""Kinds of fault that `violations` knows."""


class Failed(Exception):
    """A check did not hold, or a command did not work."""


def violations(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a container, by what the probe found in it."""
    checks = {
        "a process runs as root": "0" in found["uids"] or "0" in found["gids"] or "0" in found["groups"],
        "a capability is left": set(found["capabilities"].values()) != {NO_CAPABILITIES},
        "privileges can be gained": found["no_new_privileges"] != "1",
        "no system call is filtered": found["seccomp"] != "2",
        f"writable: {' '.join(found['writable'])}": bool(found["writable"]),
        "a file in /tmp can be executed": found["tmp_runs_programs"],
    }
    return [wrong for wrong, is_so in checks.items() if is_so]


def findings(output: str) -> dict[str, Any]:
    """What the probe printed."""
    try:
        found: dict[str, Any] = json.loads(output)
    except ValueError:
        raise Failed(f"the probe printed no findings:\n{_tail(output)}") from None
    return found


def obstacle() -> str | None:
    """Why there is nothing to run on, or None."""
    if shutil.which("docker") is None:
        return "no `docker` command here"
    for command, wanted in (("info", "a running Docker engine"), ("compose version", "the compose plugin")):
        answer = subprocess.run(["docker", *command.split()], capture_output=True, text=True, check=False)
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines() or ["no answer"]
            return f"needs {wanted}: {lines[0]}"
    return None


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """What a command wrote to its output; raises `Failed` with the last lines of that and of its errors."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout, capture_output=True, text=True, errors="replace", check=False
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise Failed(f"`{' '.join(command)}` took more than {timeout:.0f} s\n{_tail(output.decode())}") from None
    if done.returncode:
        raise Failed(f"`{' '.join(command)}` exited {done.returncode}\n{_tail(done.stdout + done.stderr)}")
    return done.stdout


def _tail(text: str, lines: int = 40) -> str:
    return _indent("\n".join(text.strip().splitlines()[-lines:]))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def requirements() -> list[str]:
    """What both images install, and what their build needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["server"], *extras["uvloop"], *extras["scheduler"]]
    return sorted({*wanted, *project["build-system"]["requires"]})


def collect_wheels() -> str:
    """Fill build/wheels/ where the image build could not; returns what was done."""
    pip = [sys.executable, "-m", "pip"]
    configured = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False).stdout
    here = any(re.search(rf"\.{key}=", configured) for key in PIP_SOURCES)
    if not here or sys.platform != "linux":
        if WHEELS.exists():
            return "from build/wheels/, which is there; remove it to use pip's default index"
        return "from pip's default index, by the image build"
    fresh = WHEELS.with_name("wheels.new")
    command = [*pip, "download", "--quiet", "--dest", str(fresh), "-c", "constraints.txt"]
    command += ["--python-version", IMAGE_PYTHON, "--only-binary=:all:", *requirements()]
    shutil.rmtree(fresh, ignore_errors=True)
    try:  # what an earlier run collected may still do
        run([*command, "--no-index", "--find-links", str(WHEELS)], env=_without_pip_sources(), timeout=600)
    except Failed:
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            run(command, timeout=1800)
        except Failed as error:
            raise Failed(f"{error}\ncollect them where pip reaches its index: {Path(__file__).name} --wheels") from None
    shutil.rmtree(WHEELS, ignore_errors=True)
    fresh.rename(WHEELS)
    files = list(WHEELS.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    return f"{len(files)} wheels, {size:.0f} MiB, collected in build/wheels/: the build needs no network"


def _without_pip_sources() -> dict[str, str]:
    """The environment, with pip told to read no configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def base_image() -> str:
    """BASE_IMAGE, else the default, else a local one where the engine has only that."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    local = [name for name in (DEFAULT_BASE, LOCAL_BASE) if _has_image(name)]
    return local[0] if local else DEFAULT_BASE


def build_image(base: str) -> str:
    """BUILD_IMAGE, else the default beside the default base, else the base: it has the same Python, and perhaps a
    compiler."""
    return os.environ.get("BUILD_IMAGE") or (DEFAULT_BUILD if base == DEFAULT_BASE else base)


def _has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0


class Stack:
    """The compose project of this run, and the checks on it."""

    def __init__(self, base: str) -> None:
        self.env = {**os.environ, **IMAGES, "BASE_IMAGE": base, "BUILD_IMAGE": build_image(base)}
        self.env.pop("COMPOSE_FILE", None)
        self.env.pop("COMPOSE_PROFILES", None)
        self.base = base

    def compose(self, *arguments: str, timeout: float = 120, gpu: bool = False) -> str:
        """Run `docker compose` on the project."""
        files = ["docker-compose.yml", *(["docker-compose.gpu.yml"] if gpu else [])]
        command = ["docker", "compose", "--project-name", PROJECT, *(part for file in files for part in ("-f", file))]
        return run([*command, *arguments], env=self.env, timeout=timeout)

    def inspect(self) -> dict[str, Any]:
        """The executor's container, as the engine sees it."""
        found: dict[str, Any] = json.loads(run(["docker", "inspect", self._executor()]))[0]
        return found

    def logs(self) -> str:
        """What the executor wrote; nothing if there is none."""
        container = self._executor()
        return run(["sh", "-c", f"docker logs {container} 2>&1"]).strip() if container else ""

    def _executor(self) -> str:
        return self.compose("ps", "--all", "--quiet", "executor").strip()

    def build(self) -> str:
        """Build both images."""
        self.compose("--profile", "job", "build", timeout=3600)
        sizes = {name: int(run(["docker", "image", "inspect", "-f", "{{.Size}}", name])) for name in IMAGES.values()}
        return f"on {self.base}: " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())

    def probe_finds_what_is_wrong(self) -> str:
        """The probe in a container of the same image without any of the hardening finds every kind of fault."""
        command = [
            "docker",
            "run",
            "--rm",
            "--user",
            "0:0",
            "--security-opt",
            "seccomp=unconfined",
            "--entrypoint",
            "python",
        ]
        command += ["--tmpfs", "/tmp:exec", IMAGES["SCHEDULER_IMAGE"], "-c", PROBE]  # noqa: S108 (the container's own)
        wrong = violations(findings(run(command)))
        if len(wrong) != FAULTS:
            raise Failed(f"the probe finds only {wrong} in a container without any protection")
        return f"{len(wrong)} of {FAULTS} kinds of fault found in an unprotected container"

    def up(self) -> str:
        """Start the executor and wait until its health check says that it serves."""
        self.compose(
            "up", "--detach", "--wait", "--wait-timeout", str(UP_TIMEOUT_S), "executor", timeout=UP_TIMEOUT_S + 60
        )
        state = self.inspect()["State"]
        if state["Health"]["Status"] != "healthy" or not state["Running"]:
            raise Failed(f"state of the executor: {state}")
        return f"healthy by its own `{' '.join(self.inspect()['Config']['Healthcheck']['Test'][1:3])}`"

    def job(self) -> str:
        """Run the scheduler to its end against the executor."""
        output = self.compose("run", "--rm", "--no-TTY", "scheduler", timeout=300)
        print(_tail(output, 30))
        served = re.search(r"^requests +(\d+) of (\d+)$", output, re.MULTILINE)
        generated = re.search(r"^generated +([\d,]+) tokens", output, re.MULTILINE)
        if served is None or generated is None:
            raise Failed("the job's output has no summary")
        if served[1] != served[2] or int(served[2]) < 1 or int(generated[1].replace(",", "")) < 1:
            raise Failed(f"the job served {served[1]} of {served[2]} requests, {generated[1]} tokens")
        return f"exit 0, {served[1]} of {served[2]} requests, {generated[1]} tokens"

    def containers_are_closed(self) -> str:
        """Ask both containers from the inside, and the engine about ports, limits and the network."""
        job = ["run", "--rm", "--no-TTY", "--no-deps", "--entrypoint", "python", "scheduler", "-c", PROBE]
        probes = {
            "executor": findings(self.compose("exec", "-T", "executor", "python", "-c", PROBE)),
            "scheduler": findings(self.compose(*job)),
        }
        for service, found in probes.items():
            if wrong := violations(found):
                raise Failed(f"{service}: {'; '.join(wrong)}\n{_indent(json.dumps(found, indent=1))}")
            if found["pip"] or found["torch"] != (service == "executor"):
                raise Failed(f"{service}: pip {found['pip']}, torch {found['torch']}")
        container = self.inspect()
        limits = container["HostConfig"]
        networks = json.loads(run(["docker", "network", "inspect", *container["NetworkSettings"]["Networks"]]))
        if not networks or not all(network["Internal"] for network in networks):
            raise Failed(
                f"networks of the executor: {[(network['Name'], network['Internal']) for network in networks]}"
            )
        if limits["PortBindings"] or any(container["NetworkSettings"]["Ports"].values()):
            raise Failed(f"the executor has ports on the host: {limits['PortBindings']}")
        if any(mount["RW"] for mount in container["Mounts"] if mount["Type"] != "tmpfs"):
            raise Failed(f"mounts of the executor: {container['Mounts']}")
        if not (limits["Memory"] and limits["PidsLimit"]) or limits["Privileged"] or limits["Binds"]:
            raise Failed(f"limits of the executor: {limits}")
        return (
            f"uid {probes['executor']['uids'][0]}, no capability, read-only root, internal network, no port on the host"
        )

    def gpu_file_adds_only_the_gpu(self) -> str:
        """Let compose merge the GPU file: nothing of the protection is lost."""
        plain, gpu = (
            json.loads(self.compose("config", "--format", "json", gpu=gpu))["services"]["executor"]
            for gpu in (False, True)
        )
        devices = gpu["deploy"]["resources"].pop("reservations")["devices"]
        if devices != [{"capabilities": ["gpu"], "driver": "nvidia", "count": 1}]:
            raise Failed(f"devices: {devices}")
        changed = {key for key in gpu if gpu[key] != plain.get(key)}
        if changed != {"deploy", "environment"} or gpu["environment"].get("FERRUM_DEVICE") != "cuda":
            raise Failed(f"the GPU file changes {sorted(changed)}, environment {gpu['environment']}")
        return "merges; adds the device, changes environment and memory, nothing else (not run: no GPU asked for)"

    def stop(self) -> str:
        """SIGTERM ends the executor with status 0, well inside its grace."""
        begin = time.monotonic()
        self.compose("stop", "executor")
        took = time.monotonic() - begin
        state = self.inspect()["State"]
        if state["ExitCode"] != 0 or state["OOMKilled"] or state["Running"]:
            raise Failed(f"after SIGTERM: {state}")
        lines = self.logs().splitlines()
        try:
            events = [json.loads(line).get("event") for line in lines]
        except ValueError:
            raise Failed(f"the log is not JSON alone:\n{_tail(chr(10).join(lines))}") from None
        if "serving" not in events or "stopping" not in events:
            raise Failed(f"events in the log: {events}")
        return f"SIGTERM, exit 0 in {took:.1f} s, {len(lines)} log lines, all JSON"

    def down(self) -> str:
        """Take everything away, and see that nothing is left."""
        self.remove()
        label = ["--filter", f"label=com.docker.compose.project={PROJECT}", "--quiet"]
        left = [run(["docker", *what, *label]) for what in (["ps", "--all"], ["network", "ls"], ["volume", "ls"])]
        if any(left):
            raise Failed(f"left behind: {left}")
        run(["docker", "image", "rm", *IMAGES.values()])  # the layers stay in the build cache
        return "no container, network, volume or image left"

    def remove(self) -> None:
        """`docker compose down`."""
        self.compose("--profile", "job", "down", "--volumes", "--remove-orphans")


def main() -> int:
    """Run every check in order; the first that fails ends the run."""
    parser = argparse.ArgumentParser(description="Build the images, run the stack, check the containers.")
    parser.add_argument("--wheels", action="store_true", help="only collect the packages; needs no engine")
    if parser.parse_args().wheels:
        try:
            print(f"packages: {collect_wheels()}")
        except Failed as error:
            print(f"packages: FAILED: {error}")
            return 1
        return 0
    if why := obstacle():
        print(f"compose-test: SKIPPED: {why}")
        return 0
    stack = Stack(base_image())
    steps = [
        ("packages", collect_wheels),
        ("build", stack.build),
        ("probe", stack.probe_finds_what_is_wrong),
        ("gpu file", stack.gpu_file_adds_only_the_gpu),
        ("up", stack.up),
        ("job", stack.job),
        ("containers", stack.containers_are_closed),
        ("stop", stack.stop),
        ("down", stack.down),
    ]
    begin = time.monotonic()
    stack.remove()  # what a run that was killed left
    name = ""
    try:
        for name, step in steps:
            started = time.monotonic()
            said = step()
            print(f"compose-test: {name}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
    except Failed as error:
        print(f"compose-test: {name}: FAILED: {error}")
        with contextlib.suppress(Failed):
            print(f"the executor's last lines:\n{_tail(stack.logs())}")
        print(f"compose-test: FAILED at {name} after {time.monotonic() - begin:.0f} s")
        return 1
    finally:
        stack.remove()
    print(f"compose-test: PASSED, {len(steps)} of {len(steps)} steps in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

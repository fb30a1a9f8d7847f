"""Build the images, run the stack, and hold the containers to what docker-compose.yml says about them.

`make compose-test`. It asks the running containers, not the files: the executor is healthy and has no way out, a
scheduler job runs through, the root filesystem refuses writes, no process has a capability, SIGTERM ends with status 0,
nothing is left behind. Before the stack is asked, the same questions go to a container that has none of this: a probe
that finds nothing wrong there proves nothing. A second job has a second executor for its prompts, a third one three
executors.

Without a Docker engine it says SKIPPED and why, with exit status 0. A failed check is exit status 1.

Where pip is configured on this machine, the packages are collected first (`tools/wheels.py`). `BASE_IMAGE`,
`BUILD_IMAGE` and every other variable of docker-compose.yml apply.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tools.commands import Failed, indent, run, tail
from tools.wheels import collect_wheels

PROJECT = "ferrum-compose-test"
IMAGES = {f"{name.upper()}_IMAGE": f"ferrum-rpc/{name}:compose-test" for name in ("executor", "scheduler", "worker")}
PROFILES = ("job", "disaggregated", "fleet", "openai")
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
CACHE_PROBE = r"""
import json, mmap, os
from pathlib import Path

def loads(folder):
    file = Path(folder, "probe.so")
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("rb") as opened:
        try:
            mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            return False
    return True

print(json.dumps({"cache": loads(os.environ["TRITON_CACHE_DIR"]), "/tmp": loads("/tmp")}))
"""
CHAT = r"""
import json, sys, time, urllib.error, urllib.request

def ask(path, body=None, refused=0):
    request = urllib.request.Request("http://127.0.0.1:30000" + path, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code not in (502, 503) or refused == 60:
            sys.exit(f"{path}: {error.code} {error.read().decode()}")
    time.sleep(0.5)
    return ask(path, body, refused + 1)

[model] = ask("/v1/models")["data"]
message = {"role": "user", "content": "It is a truth"}
chat = {"model": model["id"], "messages": [message], "max_tokens": 12, "temperature": 0}
print(json.dumps({"answers": [ask("/v1/chat/completions", chat) for _ in range(4)]}))
"""
"""Chats through the router, as any OpenAI client sends them, repeated on 502 and 503: a worker has just gone."""
NO_KERNELS = "kernels=none"
"""What an executor chose whose image was built without a C compiler."""
NO_CAPABILITIES = "0" * 16
FAULTS = 6
"""Kinds of fault that `violations` knows."""


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


def require(holds: bool, otherwise: str) -> None:
    """Raise `Failed` where a check does not hold."""
    if not holds:
        raise Failed(otherwise)


def findings(output: str) -> dict[str, Any]:
    """What the probe printed."""
    try:
        found: dict[str, Any] = json.loads(output)
    except ValueError:
        raise Failed(f"the probe printed no findings:\n{tail(output)}") from None
    return found


def _served(output: str) -> str:
    """What a job of the scheduler did by the end of its output, which is shown; all requests are served."""
    print(tail(output, 30))
    served = re.search(r"^requests +(\d+) of (\d+)$", output, re.MULTILINE)
    generated = re.search(r"^generated +([\d,]+) tokens", output, re.MULTILINE)
    if served is None or generated is None:
        raise Failed("the job's output has no summary")
    done = f"{served[1]} of {served[2]} requests, {generated[1]} tokens"
    require(served[1] == served[2] != "0" and generated[1] != "0", f"the job served {done}")
    return done


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


class Stack:
    """The compose project of this run, and the checks on it."""

    def __init__(self) -> None:
        self.env = {**os.environ, **IMAGES}
        self.env.pop("COMPOSE_FILE", None)
        self.env.pop("COMPOSE_PROFILES", None)
        self.has_kernels = False

    def compose(self, *arguments: str, timeout: float = 120, on_top: Sequence[str] = ()) -> str:
        """Run `docker compose` on the project. ``on_top``: override files."""
        files = [part for file in ("docker-compose.yml", *on_top) for part in ("-f", file)]
        return run(["docker", "compose", "--project-name", PROJECT, *files, *arguments], env=self.env, timeout=timeout)

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
        """Build all images."""
        self.compose("--profile", "job", "--profile", "openai", "build", timeout=3600)
        sizes = {name: int(run(["docker", "image", "inspect", "-f", "{{.Size}}", name])) for name in IMAGES.values()}
        return ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())

    def probe_finds_what_is_wrong(self) -> str:
        """The probe in a container of the same image without any of the hardening finds every kind of fault."""
        options = "--rm --user 0:0 --security-opt seccomp=unconfined --entrypoint python --tmpfs /tmp:exec"
        wrong = violations(findings(run(["docker", "run", *options.split(), IMAGES["SCHEDULER_IMAGE"], "-c", PROBE])))
        require(len(wrong) == FAULTS, f"the probe finds only {wrong} in a container without any protection")
        return f"{len(wrong)} of {FAULTS} kinds of fault found in an unprotected container"

    def up(self) -> str:
        """Start the executor and wait until its health check says that it serves."""
        self._up("executor")
        found = self.inspect()
        state = found["State"]
        require(state["Health"]["Status"] == "healthy" and state["Running"], f"state of the executor: {state}")
        choices = dict(self._info("executor")["device"]["choices"])
        self.has_kernels = NO_KERNELS not in choices
        health = " ".join(found["Config"]["Healthcheck"]["Test"][1:3])
        return f"healthy by its own `{health}`, {'with' if self.has_kernels else 'without'} C kernels"

    def job(self, service: str = "scheduler") -> str:
        """Run a scheduler's job to its end; the executors that it needs are started with it."""
        output = self.compose("run", "--rm", "--no-TTY", service, timeout=300)
        moved = re.search(r"^moves +(\d+) sequences", output, re.MULTILINE)
        require((moved is not None) == (service == "disaggregated"), "sequences move where there is a second executor")
        return f"exit 0, {_served(output)}" + (f", {moved[1]} moves" if moved else "")

    def _info(self, service: str) -> dict[str, Any]:
        """What an executor reports of itself."""
        found: dict[str, Any] = json.loads(self.compose("exec", "-T", service, "ferrum-rpc", "info", "--json"))
        return found

    def openai(self) -> str:
        """Chats by the router and its two workers; they end alike, also when one worker is gone."""
        self._up("executor", "router")
        found = []
        for _ in range(2):
            answers = findings(self.compose("exec", "-T", "router", "python", "-c", CHAT))["answers"]
            found += [answer["choices"][0]["message"]["content"] for answer in answers]
            self.compose("stop", "worker-1")
        require(len(set(found)) == 1 and bool(found[0]), f"greedy chats differ: {found}")
        self.compose("stop", "router", "worker-2")
        return f"{len(found)} chats, the last {len(found) // 2} with one worker: {found[0]!r}"

    def _up(self, *services: str) -> None:
        """Start services and wait until their health checks say that they serve."""
        wait = ["--detach", "--wait", "--wait-timeout", str(UP_TIMEOUT_S)]
        self.compose("up", *wait, *services, timeout=UP_TIMEOUT_S + 60)

    def containers_are_closed(self) -> str:
        """Ask both containers from the inside, and the engine about ports, limits and the network."""
        job = ["run", "--rm", "--no-TTY", "--no-deps", "--entrypoint", "python", "scheduler", "-c", PROBE]
        probes = {
            "executor": findings(self.compose("exec", "-T", "executor", "python", "-c", PROBE)),
            "scheduler": findings(self.compose(*job)),
        }
        for service, found in probes.items():
            wrong = violations(found)
            require(not wrong, f"{service}: {'; '.join(wrong)}\n{indent(json.dumps(found, indent=1))}")
            packages = f"{service}: pip {found['pip']}, torch {found['torch']}"
            require(not found["pip"] and found["torch"] == (service == "executor"), packages)
        container = self.inspect()
        limits, network = container["HostConfig"], container["NetworkSettings"]
        networks = json.loads(run(["docker", "network", "inspect", *network["Networks"]]))
        internal = [(each["Name"], each["Internal"]) for each in networks]
        require(bool(internal) and all(closed for _, closed in internal), f"networks of the executor: {internal}")
        ports = limits["PortBindings"] or any(network["Ports"].values())
        require(not ports, f"the executor has ports on the host: {limits['PortBindings']}")
        writable = any(mount["RW"] for mount in container["Mounts"] if mount["Type"] != "tmpfs")
        require(not writable, f"mounts of the executor: {container['Mounts']}")
        limited = limits["Memory"] and limits["PidsLimit"] and not limits["Privileged"] and not limits["Binds"]
        require(bool(limited), f"limits of the executor: {limits}")
        uid = probes["executor"]["uids"][0]
        return f"uid {uid}, no capability, read-only root, internal network, no port on the host"

    def gpu_file_lets_kernels_load(self) -> str:
        """With the GPU file what is written can be loaded as a library from the cache of kernels alone."""
        files = ["docker-compose.gpu.yml"]
        gpu = json.loads(self.compose("config", "--format", "json", on_top=files))["services"]["executor"]
        folder = gpu["environment"]["TRITON_CACHE_DIR"]
        mounts = [part for mount in gpu["tmpfs"] for part in ("--tmpfs", mount)]
        mounts += ["--volume", folder, "--env", f"TRITON_CACHE_DIR={folder}"]  # removed with the container
        command = ["docker", "run", "--rm", "--read-only", "--cap-drop", "ALL", *mounts, "--entrypoint", "python"]
        loads = json.loads(run([*command, IMAGES["EXECUTOR_IMAGE"], "-c", CACHE_PROBE]))
        only_the_cache = loads == {"cache": True, "/tmp": False}  # noqa: S108 (the container's own)
        require(only_the_cache, f"where a library can be loaded from with the GPU file: {loads}")
        return "kernels can be loaded from their cache alone (not run: no GPU asked for)"

    def stop(self) -> str:
        """SIGTERM ends the executor with status 0, well inside its grace."""
        begin = time.monotonic()
        self.compose("stop", "executor")
        took = time.monotonic() - begin
        state = self.inspect()["State"]
        ended = state["ExitCode"] == 0 and not state["OOMKilled"] and not state["Running"]
        require(ended, f"after SIGTERM: {state}")
        lines = self.logs().splitlines()
        try:
            events = [json.loads(line) for line in lines]
        except ValueError:
            raise Failed(f"the log is not JSON alone:\n{tail(chr(10).join(lines))}") from None
        names = {event.get("event") for event in events}
        require({"serving", "stopping"} <= names, f"events in the log: {sorted(map(str, names))}")
        warned = [event["level"] for event in events if event.get("choice") == NO_KERNELS]
        once = [] if self.has_kernels else ["warning"]
        require(warned == once, f"of {NO_KERNELS} the log has {warned}, and should have {once}")
        return f"SIGTERM, exit 0 in {took:.1f} s, {len(lines)} log lines, all JSON"

    def down(self) -> str:
        """Take everything away, and see that nothing is left."""
        self.remove()
        label = ["--filter", f"label=com.docker.compose.project={PROJECT}", "--quiet"]
        left = [run(["docker", *what, *label]) for what in (["ps", "--all"], ["network", "ls"], ["volume", "ls"])]
        require(not any(left), f"left behind: {left}")
        run(["docker", "image", "rm", *IMAGES.values()])  # the layers stay in the build cache
        return "no container, network, volume or image left"

    def remove(self) -> None:
        """`docker compose down`."""
        profiles = [part for each in PROFILES for part in ("--profile", each)]
        self.compose(*profiles, "down", "--volumes", "--remove-orphans")


def main() -> int:
    """Run every check in order; the first that fails ends the run."""
    if why := obstacle():
        print(f"compose-test: SKIPPED: {why}")
        return 0
    stack = Stack()
    steps = [
        ("packages", collect_wheels),
        ("build", stack.build),
        ("probe", stack.probe_finds_what_is_wrong),
        ("gpu file", stack.gpu_file_lets_kernels_load),
        ("up", stack.up),
        ("job", stack.job),
        ("disaggregated", lambda: stack.job("disaggregated")),
        ("fleet", lambda: stack.job("fleet")),
        ("openai", stack.openai),
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
            print(f"the executor's last lines:\n{tail(stack.logs())}")
        print(f"compose-test: FAILED at {name} after {time.monotonic() - begin:.0f} s")
        return 1
    finally:
        with contextlib.suppress(Failed):  # where the engine itself has ended, which was said above
            stack.remove()
    print(f"compose-test: PASSED, {len(steps)} of {len(steps)} steps in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

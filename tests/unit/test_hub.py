"""A model by its name on the hub: fetched once, pinned, served from the cache without a network, or refused with what
to do. The hub is a server of a few lines here."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs

from ferrum_rpc.building import found, model_folder
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.hub import is_hub_name
from tests.support.checkpoints import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny-llama"


class Hub(BaseHTTPRequestHandler):
    """One model, ``folder``, on one commit."""

    folder: Path
    asked: list[str]
    stop: Callable[[], None]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        names = sorted(each.name for each in self.folder.iterdir())
        if path.startswith(f"/api/models/{NAME}/tree/"):
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            found = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            self.answer(200, json.dumps(found).encode())
        elif path in (f"/api/models/{NAME}/revision/{each}" for each in ("main", COMMIT)):
            siblings = [{"rfilename": name} for name in names]
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/") and path.rpartition("/")[2] in names:
            self.answer(200, (self.folder / path.rpartition("/")[2]).read_bytes())
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = hashlib.sha256(content).hexdigest()
        for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    folder = make_checkpoint(tmp_path / "there", "llama")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    handler = type("OneHub", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    handler.stop = stop
    yield handler
    stop()


@pytest.mark.parametrize("name", [NAME, f"{NAME}@{COMMIT}"])
def test_a_hub_name_is_fetched_once_pinned_and_told(hub, name):
    assert model_folder(name) == name  # nothing is fetched before the port is bound
    settings = ModelSettings(name, device="cpu", kv_blocks=8)
    with capture_logs() as logs:
        folder = Path(found(settings).path)
    assert folder.name == COMMIT and "config.json" in {each.name for each in folder.iterdir()}
    assert not (folder / "pytorch_model.bin").exists()
    [told] = [each for each in logs if each["event"] == "hub_model_resolved"]
    assert told["revision"] == COMMIT and f"{NAME}@{COMMIT}" in told["action"]
    info = build_runner(found(settings)).info
    assert info.name == NAME and info.folder == str(folder)
    hub.stop()
    assert Path(found(settings).path) == folder


def test_what_the_hub_does_not_have_says_how_to_get_it(hub):
    with pytest.raises(InvalidRequest, match=r"hf download no/such --local-dir FOLDER"):
        found(ModelSettings("no/such"))
    assert any("no/such" in path for path in hub.asked)


def test_a_hub_that_cannot_be_reached_is_told_in_plain_words(hub):
    hub.stop()
    says = "on the Hugging Face hub: it is not in the cache, and the hub could not"
    with pytest.raises(InvalidRequest, match=says) as told:
        found(ModelSettings(NAME))
    assert "refused" in told.value.message and "Error:" not in told.value.message


HUB_NAMES = ("a/b", "Qwen/Qwen3-0.6B@main")
OTHERS = ("tests/nothing", "/a/b", "./a", "../a/b", "a/b/c", "a", "a/b@", "a/-b")  # `tests` is a folder here


@pytest.mark.parametrize("model", [*HUB_NAMES, *OTHERS])
def test_a_path_is_no_hub_name(monkeypatch, model):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert is_hub_name(model) is (model in HUB_NAMES)

"""Flags, environment and file are one model; a wrong name is an error with the nearest right one."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from ferrum_rpc import cli
from ferrum_rpc.cli import main
from ferrum_rpc.config import GROUPS, SETTINGS, load_settings, parse_bytes
from ferrum_rpc.usage import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("FERRUM_"):
            monkeypatch.delenv(name)


def test_precedence_is_flag_environment_file_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ferrum.toml"
    file.write_text('port = 1\nblock-size = 8\nhost = "::1"\n')
    monkeypatch.setenv("FERRUM_PORT", "2")
    monkeypatch.setenv("FERRUM_BLOCK_SIZE", "32")
    settings = load_settings("identity", {"port": "3"}, file)
    assert (settings.port, settings.model.block_size, settings.host, settings.max_batch_items) == (3, 32, "::1", 256)


def test_limits_are_the_settings_of_the_same_names() -> None:
    limits = load_settings("identity", {"max_run_tokens": "8", "max_running": "3"}).limits()
    assert (limits.max_run_tokens, limits.max_running, limits.max_followers) == (8, 3, 1)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ferrum.toml"
    file.write_text('kv_memory = "64MiB"\n')
    monkeypatch.setenv("FERRUM_CONFIG", str(file))
    assert load_settings("identity", {}).model.kv_memory == 64 << 20


def test_a_wrong_name_gets_the_nearest_one_wherever_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ferrum.toml"
    file.write_text("blok_size = 8\n")
    with pytest.raises(ConfigError, match=r"ferrum\.toml.*'blok_size' \(did you mean 'block_size'\?\)"):
        load_settings("identity", {}, file)
    with monkeypatch.context() as patch:
        patch.setenv("FERRUM_DEVISE", "cpu")
        with pytest.raises(ConfigError, match=r"FERRUM_DEVISE.*did you mean 'FERRUM_DEVICE'"):
            load_settings("identity", {})
    for arguments, nearest in (
        (["serve", "identity", "--blok-size", "8"], "--block-size"),
        (["serv", "identity"], "serve"),
        (["info", "--tagret", "x"], "--target"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert f"did you mean '{nearest}'" in capsys.readouterr().err


def test_a_wrong_value_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port: .*less than or equal to 65535"):
        load_settings("identity", {"port": "70000"})
    for name in ("max_run_tokens", "max_running"):
        with pytest.raises(ConfigError, match=rf"^{name}: .*greater than or equal to 1 \(got '0'\)"):
            load_settings("identity", {name: "0"})
    with pytest.raises(ConfigError, match="device"):
        load_settings("identity", {"device": "tpu"})
    with pytest.raises(ConfigError, match=r"quantize: .*'none' or 'int8'"):
        load_settings("identity", {"quantize": "int4"})
    for text in ("5 bananas", "inf", "nan", "1iB"):
        with pytest.raises(ConfigError, match="must be a number of bytes"):
            load_settings("identity", {"kv_memory": text})
    with pytest.raises(ConfigError, match="missing"):
        load_settings("identity", {}, tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    with pytest.raises(ConfigError, match="broken"):
        load_settings("identity", {}, broken)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1TiB", 1 << 40),
        ("1.5gi", 3 << 29),
        ("10k", 10_000),
        ("7", 7),
    ],
)
def test_bytes_are_written_with_units(text: str, number: int) -> None:
    assert parse_bytes(text) == number


def test_parking_of_idle_sequences_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"^kv_park_idle_s: needs kv_park_dir"):
        load_settings("identity", {"kv_park_idle_s": "2"})
    assert load_settings("identity", {"kv_park_idle_s": "0"}).kv_park_idle_s == 0
    assert load_settings("identity", {"kv_park_idle_s": "2", "kv_park_dir": "here"}).kv_park_idle_s == 2


def test_a_cache_sized_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^kv_blocks: must not be set with kv_memory"):
        load_settings("identity", {"kv_memory": "1MiB", "kv_blocks": "5"})
    monkeypatch.setenv("FERRUM_KV_MEMORY", "1MiB")
    with pytest.raises(ConfigError, match="must not be set with kv_memory"):
        load_settings("identity", {"kv_blocks": "5"})


def test_paths_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings("identity", {"tokens": "mine"}).tokens == tmp_path / "mine"
    settings = load_settings("identity", {"adapter_dir": "adapters"})
    assert settings.model.adapter_dir == tmp_path / "adapters", "ranks in other folders are told this one"
    with pytest.raises(ConfigError, match=str(tmp_path / "gone.toml")):
        load_settings("identity", {}, Path("gone.toml"))


def test_the_settings_are_shown_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    blocks = {block.partition(":\n")[0]: block for block in text.split("\n\n")}
    assert set(GROUPS.values()) <= set(blocks)
    assert set(GROUPS) <= set(SETTINGS)
    assert "--tokens" in blocks[GROUPS["host"]] and "--max-context" in blocks[GROUPS["kv_dtype"]]
    assert "--identity-heads" in blocks[GROUPS["identity_vocab_size"]]
    assert len(blocks["options"].splitlines()) < 5  # what is in no group
    assert len(text.partition("\n\n")[0].splitlines()) < 3  # the usage names no setting by itself


def test_every_setting_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for name, field in SETTINGS.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description


def test_ctrl_c_while_the_settings_are_imported_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_add_settings", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "identity"])
    assert caught.value.code == 130


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load_settings("identity", {}).port = 1  # type: ignore[misc]

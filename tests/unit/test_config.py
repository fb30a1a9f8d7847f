"""Flags, environment and file are one model; a wrong name is an error with the nearest right one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ferrum_rpc import cli
from ferrum_rpc.config import GROUPS, SETTINGS, load_settings, parse_bytes
from ferrum_rpc.usage import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("FERRUM_"):
            monkeypatch.delenv(name)


def test_precedence_is_flag_environment_file_default(tmp_path, monkeypatch):
    file = tmp_path / "ferrum.toml"
    file.write_text('port = 1\nblock-size = 8\nhost = "::1"\n')
    monkeypatch.setenv("FERRUM_PORT", "2")
    monkeypatch.setenv("FERRUM_BLOCK_SIZE", "32")
    monkeypatch.setenv("FERRUM_CONFIG", str(file))
    settings = load_settings("identity", {"port": "3"})
    assert (settings.port, settings.model.block_size, settings.host, settings.max_batch_items) == (3, 32, "::1", 256)


def test_limits_are_the_settings_of_the_same_names():
    limits = load_settings("identity", {"max_run_tokens": "8", "max_running": "3"}).limits()
    assert (limits.max_run_tokens, limits.max_running, limits.max_followers) == (8, 3, 1)


def test_a_wrong_name_gets_the_nearest_one_wherever_it_is_written(tmp_path, monkeypatch, command):
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
        status, _, said = command(*arguments)
        assert status == 2 and f"did you mean '{nearest}'" in said


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": "70000"}, r"port: .*less than or equal to 65535"),
        ({"max_run_tokens": "0"}, r"^max_run_tokens: .*greater than or equal to 1 \(got '0'\)"),
        ({"max_running": "0"}, r"^max_running: .*greater than or equal to 1 \(got '0'\)"),
        ({"device": "tpu"}, "device"),
        ({"quantize": "int2"}, r"quantize: .*'none', 'int8' or 'int4'"),
        *(({"kv_memory": text}, "must be a number of bytes") for text in ("5 bananas", "inf", "nan", "1iB")),
        ({"kv_park_idle_s": "2"}, r"^kv_park_idle_s: needs kv_park_dir"),
        ({"kv_memory": "1MiB", "kv_blocks": "5"}, r"^kv_blocks: must not be set with kv_memory"),
    ],
)
def test_a_wrong_value_names_the_setting(values, says):
    with pytest.raises(ConfigError, match=says):
        load_settings("identity", values)


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        load_settings("identity", {}, tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    with pytest.raises(ConfigError, match="broken"):
        load_settings("identity", {}, broken)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("512MiB", 512 << 20), ("2GiB", 2 << 30), ("2GB", 2 * 10**9), ("1TiB", 1 << 40)),
        *(("1.5gi", 3 << 29), ("10k", 10_000), ("7", 7)),
    ],
)
def test_bytes_are_written_with_units(text, number):
    assert parse_bytes(text) == number


def test_what_is_set_in_two_ways_is_looked_at_together(monkeypatch):
    assert load_settings("identity", {"kv_park_idle_s": "0"}).kv_park_idle_s == 0
    assert load_settings("identity", {"kv_park_idle_s": "2", "kv_park_dir": "here"}).kv_park_idle_s == 2
    monkeypatch.setenv("FERRUM_KV_MEMORY", "1MiB")
    with pytest.raises(ConfigError, match="must not be set with kv_memory"):
        load_settings("identity", {"kv_blocks": "5"})


def test_paths_are_whole(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_settings("identity", {"tokens": "mine"}).tokens == tmp_path / "mine"
    settings = load_settings("identity", {"adapter_dir": "adapters"})
    assert settings.model.adapter_dir == tmp_path / "adapters", "ranks in other folders are told this one"
    with pytest.raises(ConfigError, match=str(tmp_path / "gone.toml")):
        load_settings("identity", {}, Path("gone.toml"))


def test_every_setting_is_shown_in_its_group_with_help(command):
    _, text, _ = command("serve", "--help")
    assert all("--" + name.replace("_", "-") in text and field.description for name, field in SETTINGS.items())
    blocks = {block.partition(":\n")[0]: block for block in text.split("\n\n")}
    assert set(GROUPS.values()) <= set(blocks)
    assert set(GROUPS) <= set(SETTINGS)
    assert "--tokens" in blocks[GROUPS["host"]] and "--max-context" in blocks[GROUPS["kv_dtype"]]
    assert "--identity-heads" in blocks[GROUPS["identity_vocab_size"]]
    assert len(blocks["options"].splitlines()) < 5  # what is in no group
    assert len(text.partition("\n\n")[0].splitlines()) < 3  # the usage names no setting by itself


def test_ctrl_c_while_the_settings_are_imported_leaves_no_traceback(monkeypatch, command):
    def interrupted(command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_add_settings", interrupted)
    assert command("serve", "identity")[0] == 130

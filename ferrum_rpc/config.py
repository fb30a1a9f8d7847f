"""One model of every setting: flags, ``FERRUM_*`` variables and a TOML file are three ways to write it.

Precedence: flag, environment, file, default. A name that does not exist is an error with the nearest one as a hint,
wherever it was written: a misspelt limit must not be a default in disguise.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from ferrum_rpc.core import Limits
from ferrum_rpc.failpoints import parse_failpoints
from ferrum_rpc.usage import TOKEN_VARIABLE, ConfigError, hint

ENV_PREFIX: Final = "FERRUM_"
CONFIG_VARIABLE: Final = "FERRUM_CONFIG"
OTHER_VARIABLES: Final = frozenset({CONFIG_VARIABLE, TOKEN_VARIABLE, "FERRUM_FUZZ_ROUNDS"})
"""Variables with the prefix that are not settings of the server."""

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> object:
    """``64MiB``, ``2GB``, ``1048576``: a number of bytes. Other values pass through to the type's own check."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b")
    digits = text.rstrip("kmgi")
    unit = text[len(digits) :]
    try:
        return round(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(f"{value!r} is no number of bytes; write 512MiB, 2GiB or 1000000") from None


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def _checked_failpoints(text: str) -> str:
    """A setting of failpoints as it was written, if it can be parsed."""
    parse_failpoints(text)
    return text


FailpointRules = Annotated[str, AfterValidator(_checked_failpoints)]
File = Annotated[Path, AfterValidator(Path.absolute)]
"""Whole, so that a message about it says where it was looked for."""

GROUPS: Final = {
    "host": "where it listens, and who may call",
    "device": "the model, and how it computes",
    "kv_memory": "the KV cache",
    "max_sequences": "limits of a call, and of all callers together",
    "lease_ttl_s": "leases, idle sequences, quotas",
    "keepalive_time_s": "connections",
    "event_loop": "the process: its start, its end, and steps that hang",
    "metrics_port": "metrics, tracing, log",
    "failpoints": "failures to rehearse",
    "identity_vocab_size": "the identity model",
}
"""Headings of `serve --help`: the first setting of each group, in the order of the settings."""


class ServeSettings(BaseSettings):
    """Every setting of `ferrum-rpc serve`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on, or unix:PATH")
    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    tokens: File | None = Field(None, description="file of bearer tokens, `name token [operator]` a line")
    tls_cert: File | None = Field(None, description="PEM file of the server's certificate chain")
    tls_key: File | None = Field(None, description="PEM file of its key")
    tls_client_ca: File | None = Field(None, description="PEM file: ask clients for certificates of these authorities")
    operators: str = Field("", description="names of client certificates that may use ExecutorControl, with commas")
    insecure: bool = Field(False, description="listen beyond this machine without TLS and without tokens")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type of weights and cache")
    quantize: Literal["none", "int8"] = Field("none", description="int8: round weights to 8 bits, on a CPU")
    attention: str = Field("auto", description="attention backend")
    cuda_graphs: Literal["auto", "off"] = Field("auto", description="on a GPU: record decode steps and replay them")
    overlap: Literal["auto", "off"] = Field(
        "auto", description="on a GPU: begin a step while the one before it computes"
    )
    engine: Literal["thread", "process"] = Field(
        "thread", description="where the model runs: a thread of the server, or a process of its own"
    )
    threads: int | None = Field(None, ge=1, description="compute threads (default: torch's own choice)")
    kv_memory: Bytes | None = Field(
        None, description="memory of the KV cache, e.g. 2GiB (default: a share of what is free)"
    )
    kv_blocks: int | None = Field(None, ge=1, description="blocks of the KV cache exactly, instead of a memory")
    block_size: int = Field(16, ge=1, le=1024, description="tokens of a cache block")
    max_context: int | None = Field(None, ge=1, description="longest sequence (default: the model's)")
    max_sequences: int = Field(1024, ge=1, description="live sequences")
    max_batch_items: int = Field(256, ge=1, description="items of a call, and sequences of a step")
    max_batch_tokens: int = Field(8192, ge=1, description="tokens of a call, and of a step")
    max_queued_items: int = Field(4096, ge=1, description="items that may wait for a step")
    max_queued_tokens: int = Field(1 << 18, ge=1, description="tokens that may wait for a step")
    max_top_tokens: int = Field(1024, ge=1, description="k of top_tokens")
    max_selected_tokens: int = Field(4096, ge=1, description="ids of selected_tokens")
    max_request_bytes: Bytes = Field(1 << 20, description="bytes of a request message")
    max_response_bytes: Bytes = Field(32 << 20, description="bytes of an answer's rows")
    replay_bytes: Bytes = Field(64 << 20, description="bytes of recorded answers")
    max_steps_in_flight: int = Field(8, ge=1, le=256, description="steps in flight of one session")
    session_inline_bytes: Bytes = Field(1 << 20, description="tensors of a session above this come in row frames")
    max_session_response_bytes: Bytes = Field(256 << 20, description="bytes of an answer's rows in a session")
    max_unread_bytes: Bytes = Field(512 << 20, description="bytes of answers that may wait to be read, in all")
    lease_ttl_s: float = Field(30.0, gt=0, description="seconds that a lease lives without renewal, by default")
    min_lease_ttl_s: float = Field(1.0, gt=0, description="shortest lease that may be asked for, in seconds")
    max_lease_ttl_s: float = Field(3600.0, gt=0, description="longest lease that may be asked for, in seconds")
    idle_ttl_s: float = Field(600.0, gt=0, description="seconds that an unused sequence without a lease lives")
    max_leases: int = Field(1024, ge=1, description="leases at a time")
    max_sessions: int = Field(4096, ge=1, description="open sessions")
    caller_share: float = Field(
        0.5, gt=0, le=1, description="part of each table that one of several callers may hold; 1: all of it"
    )
    max_sequences_per_caller: int = Field(0, ge=0, description="live sequences of one caller; 0: its share")
    max_blocks_per_caller: int = Field(0, ge=0, description="cache blocks of one caller; 0: its share")
    keepalive_time_s: float = Field(30.0, gt=0, description="seconds of silence after which a client is pinged")
    keepalive_timeout_s: float = Field(10.0, gt=0, description="seconds that a client has to answer a ping")
    max_streams: int = Field(
        4096, ge=1, description="calls that a connection may have open; 16 blunts floods where clients use sessions"
    )
    event_loop: Literal["auto", "asyncio", "uvloop"] = Field("auto", description="auto: uvloop where it is installed")
    warmup: bool = Field(True, description="run typical steps before the first caller does")
    grace_s: float = Field(30.0, ge=0, description="seconds that owned sequences are served after SIGTERM")
    stall_timeout_s: float = Field(
        1.5, gt=0, description="seconds without a sign of life after which the model thread counts as hung"
    )
    max_step_s: float = Field(600.0, gt=0, description="seconds that an honest step may take")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of Prometheus metrics; 0 picks a free one (default: no metrics)"
    )
    metrics_host: str = Field("127.0.0.1", description="address of Prometheus metrics")
    otel_endpoint: str | None = Field(
        None, description="OpenTelemetry collector that gets a span per call, e.g. http://collector:4318"
    )
    log_format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal, else json")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    failpoints: FailpointRules = Field("", description="failures to be had, e.g. before_commit=error@3; for tests only")
    failpoint_seed: int = Field(0, description="seed of failpoints with a probability")
    identity_vocab_size: int = Field(256, ge=1, description="identity model: vocabulary")
    identity_layers: int = Field(2, ge=1, description="identity model: layers")
    identity_heads: int = Field(4, ge=1, description="identity model: query heads")
    identity_kv_heads: int = Field(4, ge=1, description="identity model: key/value heads")
    identity_head_dim: int = Field(8, ge=1, description="identity model: width of a head")
    identity_max_context: int = Field(32768, ge=1, description="identity model: longest sequence")
    identity_positional: bool = Field(False, description="identity model: add a positional term")

    @field_validator("kv_blocks")
    @classmethod
    def _one_size(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and others.data.get("kv_memory") is not None:
            raise ValueError("kv_memory says how large the cache is; set one of the two")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_settings` merges the sources, so that the precedence stands in one line of ours."""
        return (init_settings,)

    def limits(self) -> Limits:
        """The part that the service floor enforces and GetInfo names."""
        return Limits(
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(Limits)
                if field.name != "exact_span_tokens"
            }
        )


def read_file(path: Path) -> dict[str, Any]:
    """A config file's settings; raises `ConfigError` that names the file."""
    path = path.absolute()
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    values = {key.replace("-", "_"): value for key, value in values.items()}
    _check_names(values, ServeSettings.model_fields, f"config file {path}: no setting")
    return values


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> ServeSettings:
    """The settings of a run. ``flags`` holds what was written on the command line; ``config_file`` defaults to
    FERRUM_CONFIG. Raises `ConfigError`."""
    variables = {f"{ENV_PREFIX}{name.upper()}" for name in ServeSettings.model_fields} | OTHER_VARIABLES
    given = [name.upper() for name in os.environ if name.upper().startswith(ENV_PREFIX)]
    _check_names(given, variables, "environment: no variable")
    if config_file is None and CONFIG_VARIABLE in os.environ:
        config_file = Path(os.environ[CONFIG_VARIABLE])
    in_file = {} if config_file is None else read_file(config_file)
    in_environment = EnvSettingsSource(ServeSettings)()
    try:
        return ServeSettings(**{**in_file, **in_environment, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {message} (got {first['input']!r})") from error


def _check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = sorted(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{what} {name!r}{hint(name, known)}")

"""All settings in one model: flags, ``FERRUM_*`` variables and a TOML file are three ways to set them.

Precedence: flag, environment, file, default. An unknown name is an error with the nearest one as a hint, wherever it
was written: a misspelt limit must not silently become a default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from ferrum_rpc.core import Limits
from ferrum_rpc.failpoints import parse_failpoints
from ferrum_rpc.usage import ISA_VARIABLE, TOKEN_VARIABLE, ConfigError, hint

ENV_PREFIX: Final = "FERRUM_"
CONFIG_VARIABLE: Final = "FERRUM_CONFIG"
OTHER_VARIABLES: Final = frozenset({CONFIG_VARIABLE, ISA_VARIABLE, TOKEN_VARIABLE, "FERRUM_FUZZ_ROUNDS"})
"""Variables with the prefix that are not server settings."""

IDENTITY: Final = "identity"
"""The path of the model that has no weights and no folder."""

_POWERS: Final = {letter: power for power, letter in enumerate("kmgt", 1)}
_UNITS: Final = {"": 1} | {k: 1000**n for k, n in _POWERS.items()} | {f"{k}i": 1024**n for k, n in _POWERS.items()}


def parse_bytes(value: object) -> object:
    """A number of bytes such as ``64MiB``, ``2GB``, ``1048576``. Other values pass through to the type's own check."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b")
    digits = text.rstrip("kmgti")
    unit = text[len(digits) :]
    try:
        return round(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError("must be a number of bytes, such as 512MiB, 2GiB or 1000000") from None


def read_bytes(name: str, text: str) -> int:
    """A number of bytes that is not a setting. Raises `ConfigError` that names it."""
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error} (got {text!r})") from None
    if not isinstance(count, int) or count <= 0:
        raise ConfigError(f"{name}: must be greater than 0 (got {text!r})")
    return count


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def _checked_failpoints(text: str) -> str:
    """A setting of failpoints unchanged, if it can be parsed."""
    parse_failpoints(text)
    return text


FailpointRules = Annotated[str, AfterValidator(_checked_failpoints)]
File = Annotated[Path, AfterValidator(Path.absolute)]
"""Absolute, so that a message shows where the file was expected."""

GROUPS: Final = {
    "host": "address, TLS and credentials",
    "device": "model and computation",
    "kv_dtype": "KV cache",
    "max_batch_items": "limits of a call and of all callers",
    "lease_ttl_s": "leases, idle sequences, quotas",
    "keepalive_time_s": "connections",
    "event_loop": "process: start, shutdown, hang detection",
    "metrics_port": "metrics, tracing, log",
    "failpoints": "failure injection",
    "identity_vocab_size": "the identity model",
}
"""Headings of `serve --help`: the first setting of each group, in the order of the settings."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ModelSettings:
    """The settings of an engine. ``path`` is ``identity`` or a Hugging Face folder, ``name`` the name of a built-in
    model. ``block_order`` permutes the cache's physical blocks, which must not change a bit of any answer. Fields with
    a description are options."""

    path: str
    name: str = ""
    block_order: tuple[int, ...] | None = None
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device of the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of weights and cache"
    )
    model_backend: Literal["auto", "native", "hf"] = Field(
        default="auto",
        description="native: our decoder; hf: transformers; auto: hf for what the native decoder does not support",
    )
    quantize: Literal["auto", "none", "int8", "int4"] = Field(
        default="auto",
        description="on a CPU: quantize weights to 8 bits, or to 4 with a head of 8; auto: if dtype is auto too, "
        "integers of a quantized checkpoint stay as they are stored; none: they are expanded",
    )
    attention: str = Field(default="auto", description="attention backend")
    cuda_graphs: Literal["auto", "off"] = Field(
        default="auto", description="on a GPU: capture decode steps as CUDA graphs"
    )
    verify_tokens: int = Field(
        default=0,
        ge=0,
        le=8,
        description="on a GPU: capture also steps that verify drafts, of up to this many tokens for each sequence "
        "(0: none)",
    )
    overlap: Literal["auto", "off"] = Field(
        default="auto", description="on a GPU: begin a step while the previous one computes"
    )
    threads: int | None = Field(default=None, ge=1, description="compute threads (default: torch's own choice)")
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="ranks over which every layer is sharded")
    pipeline_parallel: int = Field(default=1, ge=1, le=64, description="stages over which the layers are divided")
    rank_transport: Literal["auto", "shared-memory", "gloo", "nccl"] = Field(
        default="auto",
        description="transport between ranks; auto: nccl on GPUs, shared memory on one machine, else gloo",
    )
    trust_rank_network: bool = Field(
        default=False, description="allow ranks on other machines, unencrypted: only in a trusted network"
    )
    adapter_dir: File | None = Field(
        default=None, description="folder of LoRA adapters, each a folder as PEFT writes it (default: no adapters)"
    )
    max_adapters: int = Field(default=32, ge=1, description="maximum number of loaded adapters")
    max_adapter_rank: int = Field(default=64, ge=1, le=1024, description="maximum rank of an adapter")
    adapter_memory: Bytes = Field(default=1 << 30, description="memory for loaded adapters, e.g. 2GiB")
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="type of keys and values; 8 bits: int8 on a CPU, fp8 on a GPU",
    )
    kv_memory: Bytes | None = Field(
        default=None, description="memory of the KV cache, e.g. 2GiB (default: a share of the free memory)"
    )
    kv_blocks: int | None = Field(
        default=None, ge=1, description="exact number of KV cache blocks, instead of kv_memory"
    )
    state_slots: int | None = Field(
        default=None,
        ge=2,
        description="models with recurrent layers: number of slots for states, one for each live sequence, the others "
        "for checkpoints (default: half of the cache's memory)",
    )
    kv_tier_dir: File | None = Field(
        default=None, description="folder for blocks evicted from the prefix cache; it outlives the process"
    )
    kv_tier_bytes: Bytes = Field(default=8 << 30, description="maximum size of kv_tier_dir, e.g. 50GiB")
    block_size: int = Field(default=16, ge=1, le=1024, description="tokens per cache block")
    max_context: int | None = Field(default=None, ge=1, description="maximum sequence length (default: the model's)")
    max_sequences: int = Field(default=1024, ge=1, description="maximum number of live sequences")
    max_grammars: int = Field(
        default=64, ge=0, description="maximum number of registered grammars, each a process; 0: no grammars"
    )
    grammar_memory: Bytes = Field(default=256 << 20, description="maximum memory of one grammar, e.g. 256MiB")
    identity_vocab_size: int = Field(default=256, ge=1, description="identity model: vocabulary")
    identity_layers: int = Field(default=2, ge=1, description="identity model: layers")
    identity_heads: int = Field(default=4, ge=1, description="identity model: query heads")
    identity_kv_heads: int = Field(default=4, ge=1, description="identity model: key/value heads")
    identity_head_dim: int = Field(default=8, ge=1, description="identity model: head dimension")
    identity_max_context: int = Field(default=32768, ge=1, description="identity model: maximum sequence length")
    identity_positional: bool = Field(default=False, description="identity model: add a positional term")

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @field_validator("kv_blocks")
    @classmethod
    def _one_size(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and others.data.get("kv_memory") is not None:
            raise ValueError("must not be set with kv_memory: both give the size of the cache")
        return value


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ServeSettings:
    """Every setting of `ferrum-rpc serve`."""

    model: ModelSettings
    host: str = Field(default="127.0.0.1", description="address to listen on, or unix:PATH")
    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    tokens: File | None = Field(
        default=None, description="file of bearer tokens, one `name token [operator] [trusted]` per line"
    )
    tls_cert: File | None = Field(default=None, description="PEM file of the server's certificate chain")
    tls_key: File | None = Field(default=None, description="PEM file of the server's key")
    tls_client_ca: File | None = Field(
        default=None, description="PEM file of authorities: clients must show a certificate of one of them"
    )
    operators: str = Field(
        default="", description="names of client certificates that may use ExecutorControl, comma-separated"
    )
    trusted: str = Field(
        default="", description="names of client certificates whose imports all callers may find, comma-separated"
    )
    insecure: bool = Field(default=False, description="allow other machines to connect without TLS and tokens")
    max_batch_items: int = Field(default=256, ge=1, description="maximum items per call, and sequences per step")
    max_batch_tokens: int = Field(default=8192, ge=1, description="maximum tokens per call and per step")
    max_queued_items: int = Field(default=4096, ge=1, description="maximum items that wait for a step")
    max_queued_tokens: int = Field(default=1 << 18, ge=1, description="maximum tokens that wait for a step")
    max_top_tokens: int = Field(default=1024, ge=1, description="maximum k of top_tokens")
    max_selected_tokens: int = Field(default=4096, ge=1, description="maximum ids of selected_tokens")
    max_run_tokens: int = Field(default=32, ge=1, description="maximum tokens per run")
    max_running: int = Field(default=64, ge=1, description="maximum running runs, and runs per call")
    max_request_bytes: Bytes = Field(default=1 << 20, description="maximum size of a request message")
    max_response_bytes: Bytes = Field(default=32 << 20, description="maximum size of an answer's rows")
    replay_bytes: Bytes = Field(default=64 << 20, description="maximum size of rows in recorded answers")
    max_steps_in_flight: int = Field(default=64, ge=1, le=256, description="maximum steps in flight per session")
    session_inline_bytes: Bytes = Field(
        default=1 << 20, description="larger tensors of a session are sent in `rows` frames"
    )
    max_session_response_bytes: Bytes = Field(
        default=256 << 20, description="maximum size of an answer's rows in a session"
    )
    max_unread_bytes: Bytes = Field(default=512 << 20, description="maximum size of all answers that wait to be read")
    lease_ttl_s: float = Field(
        default=30.0, gt=0, description="default duration of a lease without renewal, in seconds"
    )
    min_lease_ttl_s: float = Field(default=1.0, gt=0, description="minimum duration of a lease, in seconds")
    max_lease_ttl_s: float = Field(default=3600.0, gt=0, description="maximum duration of a lease, in seconds")
    idle_ttl_s: float = Field(
        default=600.0, gt=0, description="seconds after which an unused sequence without a lease is released"
    )
    kv_park_dir: File | None = Field(default=None, description="folder for parked sequences (default: no parking)")
    kv_park_bytes: Bytes = Field(default=8 << 30, description="maximum size of all parked sequences")
    kv_park_idle_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds after which an unused sequence is parked if blocks are short; 0: only on request",
    )
    kv_transport: Literal["grpc", "nixl"] = Field(
        default="grpc",
        description="transport of sequences between executors; nixl: in addition to gRPC, only in a trusted network",
    )
    max_leases: int = Field(default=1024, ge=1, description="maximum number of leases")
    max_sessions: int = Field(default=4096, ge=1, description="maximum number of open sessions")
    max_watchers: int = Field(default=64, ge=1, description="maximum number of streams of cache events (WatchKvEvents)")
    max_transfers: int = Field(default=4, ge=1, description="maximum number of concurrent exports and imports")
    max_token_masks: int = Field(
        default=2048, ge=1, description="maximum number of registered token masks of all callers"
    )
    max_grammar_bytes: Bytes = Field(default=256 << 10, description="maximum size of a grammar's text")
    caller_share: float = Field(
        default=0.5, gt=0, le=1, description="fraction of each limit that one of several callers may use; 1: all"
    )
    max_sequences_per_caller: int = Field(
        default=0, ge=0, description="maximum live sequences per caller; 0: its caller_share"
    )
    max_blocks_per_caller: int = Field(
        default=0, ge=0, description="maximum cache blocks per caller; 0: its caller_share"
    )
    keepalive_time_s: float = Field(default=30.0, gt=0, description="seconds of silence after which a client is pinged")
    keepalive_timeout_s: float = Field(
        default=10.0, gt=0, description="seconds within which a client must answer a ping"
    )
    max_streams: int = Field(
        default=4096,
        ge=1,
        description="maximum open calls per connection; set 16 against floods if clients use sessions",
    )
    event_loop: Literal["auto", "asyncio", "uvloop"] = Field(default="auto", description="auto: uvloop if installed")
    engine: Literal["thread", "process"] = Field(
        default="thread", description="run the model in a thread of the server, or in a separate process"
    )
    warmup: bool = Field(default=True, description="run typical steps at the start")
    grace_s: float = Field(default=30.0, ge=0, description="seconds for which owned sequences are served after SIGTERM")
    stall_timeout_s: float = Field(
        default=1.5, gt=0, description="seconds without progress after which the model thread counts as hung"
    )
    max_step_s: float = Field(default=600.0, gt=0, description="maximum duration of a step, in seconds")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="port of Prometheus metrics; 0 picks a free one (default: no metrics)"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of Prometheus metrics")
    otel_endpoint: str | None = Field(
        default=None, description="OpenTelemetry collector for a span per call, e.g. http://collector:4318"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console on a terminal, else json"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )
    failpoints: FailpointRules = Field(
        default="", description="failures to inject, e.g. before_commit=error@3; for tests only"
    )
    failpoint_seed: int = Field(default=0, description="seed for failpoints with a probability")

    @field_validator("kv_park_idle_s")
    @classmethod
    def _somewhere(cls, value: float, others: ValidationInfo) -> float:
        if value and others.data.get("kv_park_dir") is None:
            raise ValueError("needs kv_park_dir")
        return value

    def limits(self) -> Limits:
        """The limits that the service floor enforces and GetInfo or the metrics report."""
        own = {name: getattr(self, name) for name in Limits.__dataclass_fields__ if hasattr(self, name)}
        model = self.model
        if model.adapter_dir is not None:
            own |= {"max_adapters": model.max_adapters, "adapter_memory": model.adapter_memory}
        if model.kv_tier_dir is not None:
            own["kv_tier_bytes"] = model.kv_tier_bytes
        return Limits(**own, max_sequences=model.max_sequences, max_grammars=model.max_grammars)


SETTINGS: Final[dict[str, FieldInfo]] = {
    name: field
    for settings in (ServeSettings, ModelSettings)
    for name, field in vars(settings)["__pydantic_fields__"].items()
    if field.description
}
"""All settings by their names in a file, in the order of declaration."""


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
    _check_names(values, SETTINGS, f"config file {path}: unknown setting")
    return values


def load_settings(path: str, flags: Mapping[str, Any], config_file: Path | None = None) -> ServeSettings:
    """The settings for serving the model at ``path``. ``flags``: values from the command line; ``config_file`` defaults
    to FERRUM_CONFIG. Raises `ConfigError`."""
    names = {f"{ENV_PREFIX}{name.upper()}": name for name in SETTINGS}
    variables = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}
    _check_names(variables, names.keys() | OTHER_VARIABLES, "environment: unknown variable")
    if config_file is None and CONFIG_VARIABLE in os.environ:
        config_file = Path(os.environ[CONFIG_VARIABLE])
    in_file = {} if config_file is None else read_file(config_file)
    in_environment = {names[variable]: value for variable, value in variables.items() if variable in names}
    given = {**in_file, **in_environment, **flags}
    of_model = {name: given.pop(name) for name in list(given) if name in ModelSettings.__dataclass_fields__}
    try:
        return ServeSettings(model=ModelSettings(path, **of_model), **given)
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

"""Models of text and images: where such a checkpoint has its decoder, which is one of `families`. Images are not
supported.

Configurations have a section for each part. That of the text omits much, sizes included: the defaults of the text
part's class in transformers apply. Tensors have the names that transformers used when they were written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import IRRELEVANT, NEUTRAL, OF_MODEL, refuse_unread
from ferrum_rpc.models.fields import Fields

SECTION: Final = "text_config"
SHARED: Final = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys of the whole model, which take precedence over the section's."""

OF_IMAGES: Final = frozenset(
    (
        *("vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index"),
        *("eoi_token_id", "mm_tokens_per_image", "image_seq_length", "projector_hidden_act", "vision_feature_layer"),
        *(
            "vision_feature_select_strategy",
            "multimodal_projector_bias",
            "spatial_merge_size",
            "processor_class",
            "ignore_index",
        ),
        *("video_token_id", "vision_start_token_id", "vision_end_token_id"),
    )
)


@dataclass(frozen=True, slots=True)
class Roots:
    """Prefixes of tensors' names: of the decoder's body, of its head, of the parts for images, and of layers that draft
    tokens (``{layers}``: how many others there are)."""

    body: str = "model."
    head: str = "lm_head."
    images: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()


PLAIN: Final = Roots()
INNER: Final = Roots("model.language_model.", "lm_head.", ("model.vision_tower.", "model.multi_modal_projector."))
"""Names of modules since transformers 4.52, and of adapters."""

ROOTS: Final = (
    Roots("language_model.model.", "language_model.lm_head.", ("vision_tower.", "multi_modal_projector.")),
    INNER,
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text part: its class as a model of its own, and the defaults of the sizes that its section omits."""

    name: str
    absent: Mapping[str, int]


TEXTS: Final[dict[str, TextPart]] = {
    "gemma3_text": TextPart(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "llama": TextPart(
        "LlamaForCausalLM",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": TextPart(
        "MistralForCausalLM",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen3_5_text": TextPart(
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 248_320,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "max_position_embeddings": 32_768,
        },
    ),
    "qwen3_5_moe_text": TextPart(
        "Qwen3_5MoeForCausalLM",
        {
            "vocab_size": 248_320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "max_position_embeddings": 32_768,
        },
    ),
}
"""By the ``model_type`` of the section."""


@dataclass(frozen=True, slots=True)
class WithImages:
    """``texts``: its possible text parts, by their ``model_type``; the first is the default. ``roots``: how its tensors
    may be named."""

    model_type: str
    texts: tuple[str, ...]
    roots: tuple[Roots, ...] = ROOTS


_QWEN_35: Final = (Roots("model.language_model.", "lm_head.", ("model.visual.",), ("mtp.",)),)

WITH_IMAGES: Final[dict[str, WithImages]] = {
    "Gemma3ForConditionalGeneration": WithImages("gemma3", ("gemma3_text",)),
    "Mistral3ForConditionalGeneration": WithImages("mistral3", ("mistral",)),
    "LlavaForConditionalGeneration": WithImages("llava", ("llama", "mistral")),
    "Qwen3_5ForConditionalGeneration": WithImages("qwen3_5", ("qwen3_5_text",), _QWEN_35),
    "Qwen3_5MoeForConditionalGeneration": WithImages("qwen3_5_moe", ("qwen3_5_moe_text",), _QWEN_35),
}
"""By ``architectures[0]``."""

_DRAFTS: Final = Roots(drafts=("mtp.",))
WITH_DRAFTS: Final = {
    "Qwen3NextForCausalLM": _DRAFTS,
    "Qwen3_5ForCausalLM": _DRAFTS,
    "Qwen3_5MoeForCausalLM": _DRAFTS,
    "DeepseekV3ForCausalLM": Roots(drafts=("model.layers.{layers}.",)),
}
"""Models of text alone whose checkpoints may have layers that draft tokens."""


def text_part(name: str, config: Fields) -> tuple[str, Fields]:
    """The class of the text part of a model of text and images, and its configuration."""
    known = WITH_IMAGES[name]
    if config.text("model_type", known.model_type) != known.model_type:
        shown = config.text("model_type")[:80]
        raise InvalidRequest(f"model_type {shown!r} is not that of {name}", field="model_type")
    section = config.value(SECTION)
    if not isinstance(section, dict):
        raise InvalidRequest(f"{SECTION} is missing; it must be an object", field=SECTION)
    shared = {key: value for key in SHARED if (value := config.value(key)) is not None}
    said = config.value("vocab_size")  # the first LLaVAs have it in both places
    refuse_unread(config, IRRELEVANT | OF_IMAGES, NEUTRAL, OF_MODEL)
    kind = Fields(section, SECTION).text("model_type", known.texts[0])
    if kind not in known.texts:
        raise NotSupported(
            f"{SECTION}.model_type: {name} of {kind[:80]!r} is not supported, of {', '.join(known.texts)} it is",
            field=f"{SECTION}.model_type",
        )
    text = TEXTS[kind]
    absent = {key: value for key, value in text.absent.items() if section.get(key) is None}
    fields = Fields(
        {key: value for key, value in {**section, **absent, **shared}.items() if key != "model_type"}, SECTION
    )
    if said is not None and said != fields.value("vocab_size"):
        raise InvalidRequest(f"vocab_size is not that of {SECTION}", field="vocab_size")
    if [*fields.texts("architectures")] not in ([], [text.name]):
        where = f"{SECTION}.architectures"
        raise InvalidRequest(f"{where} does not name {text.name}, which {kind} is", field=where)
    return text.name, fields


def roots(architecture: str, names: Collection[str], embedding: str) -> Roots:
    """The prefixes of a checkpoint with these ``names`` of tensors: that of the ``embedding`` decides."""
    if architecture not in WITH_IMAGES:
        return WITH_DRAFTS.get(architecture, PLAIN)
    known = WITH_IMAGES[architecture].roots
    return next((each for each in known if each.body + embedding in names), known[0])


def adapted_roots(architecture: str) -> Roots:
    """The prefixes of an adapter's tensors."""
    return INNER if architecture in WITH_IMAGES else PLAIN

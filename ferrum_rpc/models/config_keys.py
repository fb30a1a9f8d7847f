"""Which keys of a ``config.json`` are honoured, and which need not be.

A key that a spec does not read must be listed here, or be null; otherwise it is refused by name. An unknown key may
change every number (a soft cap, a scale, another norm), and wrong answers look like right ones. The lists are based on
transformers 5.23, whose classes for the supported families read no such key in a forward pass, and on the published
configurations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ferrum_rpc.errors import NotSupported, Reason, listed
from ferrum_rpc.models.fields import Fields


class UnknownKey(NotSupported):
    """A configuration has a key that is not known to be harmless."""

    reason = Reason.NOT_SUPPORTED


IRRELEVANT: Final = frozenset(
    (
        # where the file comes from, and who wrote it
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed"),
        *("auto_map", "_auto_class", "transformers.js_config", "is_llama_config", "model_name", "paddlenlp_version"),
        "is_composition",
        # how transformers runs; code that comes with a checkpoint is never run here
        *("use_cache", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript"),
        *("chunk_size_feed_forward", "pretraining_tp", "gradient_checkpointing", "use_bfloat16", "is_decoder"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
        *("_attn_implementation_autoset", "_experts_implementation", "_experts_implementation_internal"),
        *("_flash_attn_2_enabled", "use_flash_attention", "use_flash_attention_2", "use_sdpa", "tf_legacy_loss"),
        # training
        *("initializer_range", "attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop"),
        *("resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
        "neftune_noise_alpha",
        # other heads than the next token's
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        # text, tokens and generation: a scheduler's business
        *("tokenizer_class", "prefix", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side", "max_sequence_length"),
        *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty", "exponential_decay_length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "tie_last_hidden_states"),
        # how weights are stored: who reads them reads this, every key of it
        "quantization_config",
        # the context before scaling, where no scaling reads it
        "original_max_position_embeddings",
    )
)
"""Keys whose value changes no logit of a supported family."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_bias": (False,),  # of families whose biases are given
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "alibi": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
    "rope_scaling_factor": (1.0,),
    "scale_attn_weights": (True,),
    "quantization": ({},),
}
"""Keys that are accepted with the values that turn a feature off."""

ROPE_IRRELEVANT: Final = frozenset(("finetuned",))
"""As `IRRELEVANT`, of ``rope_scaling`` and ``rope_parameters``."""


REMEDY: Final = "remove what the model does without from the configuration"
OF_MODEL: Final = f"{REMEDY}, or have transformers run the model: --model-backend hf"
"""Of keys that transformers reads by itself; weights are read here in any case."""


def refuse_unread(
    fields: Fields, irrelevant: Collection[str], neutral: Mapping[str, tuple[object, ...]], remedy: str = REMEDY
) -> None:
    """Raise UnknownKey for the first key that was not read and is in neither list; it names the others too, and the
    ``remedy``."""
    unknown = {
        key: value
        for key, value in fields.unread().items()
        if key not in irrelevant
        and not any(value == each and type(value) is type(each) for each in neutral.get(key, ()))
    }
    if not unknown:
        return
    key, *others = unknown
    name, shown = fields.name(key[:80]), repr(unknown[key])[:80]
    why = "is not supported" if key in neutral else "is not known here, and might change what the model computes"
    same = f", and {listed('more', [fields.name(each[:80]) for each in others])}" if others else ""
    raise UnknownKey(f"{name}: {shown} {why}{same}; {remedy}", field=name)

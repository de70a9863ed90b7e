"""Families of Hugging Face transformers: for each a small model in float64 without dropout, a batch and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, WORDS = 4, 10, 64  # what batches of text have
SMALL: Mapping[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "num_key_value_heads": 2, "head_dim": 8, "embedding_size": 32,
    "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

Batch = dict[str, Tensor]


def words(seed: int) -> Batch:
    """Sequences of which half are shorter than the others, with a label for most words."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, LENGTH - 3 :] = 0
    ids = ids.masked_fill(mask == 0, 0)
    unknown = (torch.rand(ids.shape, generator=generator) < 0.2) | (mask == 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(unknown, -100)}


def two_languages(seed: int) -> Batch:
    given, wanted = words(seed), words(seed + 1000)
    return {**given, "labels": wanted["labels"][:, :7].contiguous()}


def classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (ROWS,), generator=generator)


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": classes(generator)}


def images_with_words(seed: int) -> Batch:
    given = words(seed)
    return {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "pixel_values": images(seed)["pixel_values"],
    }


def sounds(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(ROWS, 400, generator=generator, dtype=torch.float64)
    return {"input_values": waves, "labels": classes(generator)}


def spectra(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, 8, 40, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": words(seed)["labels"][:, :7]}


@dataclass(frozen=True)
class Family:
    """``head`` is the class of transformers, or what follows ``AutoModelFor``; ``config`` what is not as in `SMALL`."""

    name: str
    kind: str
    head: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[int], Batch] = words
    dtype: torch.dtype = torch.float64

    def model(self) -> nn.Module:
        import transformers  # takes seconds, and only the ranks need it

        torch.manual_seed(0)
        config = configured(self.name.partition(":")[0], self.config)
        if "For" in self.head:
            made: nn.Module = getattr(transformers, self.head)(config)
        else:
            made = getattr(transformers, f"AutoModelFor{self.head}" if self.head else "AutoModel").from_config(config)
        return made.to(self.dtype).train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        more = {"return_loss": True} if not self.head else {}
        return model(**batch, **more).loss


def configured(name: str, changed: Mapping[str, Any]) -> Any:
    """The small configuration of a family, without dropout of any kind."""
    import transformers

    of_family = transformers.CONFIG_MAPPING[name]
    known = of_family().to_dict()
    renamed = {of_family.attribute_map.get(key, key): value for key, value in SMALL.items()}
    small = {key: value for key, value in renamed.items() if key in known or key == "num_labels"}
    config = of_family(**{**small, **changed})
    return without_dropout(config)


def without_dropout(config: Any) -> Any:
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):  # the configuration of a part
            without_dropout(value)
    return config


VISION = {"hidden_size": 32, "image_size": 32, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}
ONE_BLOCK = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
TINY = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

KINDS = ("encoder", "decoder", "encoder-decoder", "vision", "audio", "mixture of experts")
FAMILIES = (
    Family("bert", "encoder", "MaskedLM"),
    Family("roberta", "encoder", "MaskedLM", {"max_position_embeddings": 40}),
    Family("xlm-roberta", "encoder", "MaskedLM", {"max_position_embeddings": 40}),
    Family("albert", "encoder", "MaskedLM"),
    Family("distilbert", "encoder", "MaskedLM", {"dim": 32, "hidden_dim": 64, "n_heads": 4}),
    Family("electra", "encoder", "MaskedLM"),
    Family("deberta", "encoder", "MaskedLM"),
    Family("deberta-v2", "encoder", "MaskedLM"),
    Family("mpnet", "encoder", "MaskedLM", {"max_position_embeddings": 40}),
    Family("modernbert", "encoder", "MaskedLM", {"global_attn_every_n_layers": 2, "local_attention": 4}),
    Family("camembert", "encoder", "MaskedLM", {"max_position_embeddings": 40}),
    Family("fnet", "encoder", "MaskedLM"),
    Family("convbert", "encoder", "MaskedLM"),
    Family("roformer", "encoder", "MaskedLM"),
    Family("big_bird", "encoder", "MaskedLM", {"attention_type": "original_full"}),
    Family("esm", "encoder", "MaskedLM", {"mask_token_id": 3}),
    Family("gpt2", "decoder", "CausalLM"),
    Family("gpt_neo", "decoder", "CausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    Family("gpt_neox", "decoder", "CausalLM"),
    Family("gptj", "decoder", "CausalLM", {"rotary_dim": 4}),
    Family("opt", "decoder", "CausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    Family("bloom", "decoder", "CausalLM"),
    Family("llama", "decoder", "CausalLM"),
    Family("mistral", "decoder", "CausalLM", {"sliding_window": 4}),
    Family("qwen2", "decoder", "CausalLM"),
    Family("qwen3", "decoder", "CausalLM"),
    Family("gemma", "decoder", "CausalLM"),
    Family("gemma2", "decoder", "CausalLM", {"sliding_window": 4}),
    Family("gemma3_text", "decoder", "CausalLM", {"sliding_window": 4}),
    Family("phi", "decoder", "CausalLM", {"num_key_value_heads": 4}),
    Family("phi3", "decoder", "CausalLM"),
    Family("falcon", "decoder", "CausalLM"),
    Family("stablelm", "decoder", "CausalLM"),
    Family("granite", "decoder", "CausalLM"),
    Family("olmo2", "decoder", "CausalLM"),
    Family("cohere", "decoder", "CausalLM"),
    Family("starcoder2", "decoder", "CausalLM"),
    Family("codegen", "decoder", "CausalLM", {"rotary_dim": 4}),
    Family("smollm3", "decoder", "CausalLM"),
    Family("mamba", "decoder", "CausalLM", {"state_size": 4, "time_step_rank": 4}),
    Family("t5", "encoder-decoder", "Seq2SeqLM", {"d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}, two_languages),
    Family("mt5", "encoder-decoder", "Seq2SeqLM", {"d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}, two_languages),
    Family("bart", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family("pegasus", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family("mbart", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family("marian", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family("m2m_100", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family("blenderbot", "encoder-decoder", "Seq2SeqLM", TINY, two_languages),
    Family(
        "whisper",
        "audio",
        "SpeechSeq2Seq",
        {**TINY, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        spectra,
    ),
    Family("wav2vec2", "audio", "AudioClassification", ONE_BLOCK, sounds),
    Family("hubert", "audio", "AudioClassification", ONE_BLOCK, sounds),
    Family("wavlm", "audio", "AudioClassification", ONE_BLOCK, sounds),
    Family(
        "audio-spectrogram-transformer",
        "audio",
        "AudioClassification",
        {"num_mel_bins": 16, "max_length": 24, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
        lambda seed: {
            "input_values": torch.randn(
                ROWS, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            ),
            "labels": images(seed)["labels"],
        },
    ),
    Family("vit", "vision", "ImageClassification", VISION, images),
    Family("deit", "vision", "DeiTForImageClassification", VISION, images),
    Family("swin", "vision", "ImageClassification", SWIN, images),
    Family("swinv2", "vision", "ImageClassification", SWIN, images),
    Family("convnext", "vision", "ImageClassification", CONVNEXT, images),
    Family("convnextv2", "vision", "ImageClassification", CONVNEXT, images),
    Family("beit", "vision", "ImageClassification", VISION, images),
    Family("dinov2", "vision", "ImageClassification", VISION, images),
    Family(
        "resnet",
        "vision",
        "ImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        images,
    ),
    Family("mobilenet_v2", "vision", "ImageClassification", {"image_size": 32, "depth_multiplier": 0.35}, images),
    Family(
        "efficientnet",
        "vision",
        "ImageClassification",
        {"image_size": 32, "width_coefficient": 0.2, "depth_coefficient": 0.1, "hidden_dim": 256},
        images,
    ),
    Family(
        "poolformer", "vision", "ImageClassification", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, images
    ),
    Family(
        "segformer",
        "vision",
        "ImageClassification",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
        images,
    ),
    Family(
        "clip",
        "vision",
        "",
        {
            "text_config": {**SMALL, "projection_dim": 16},
            "vision_config": {**VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
            "projection_dim": 16,
        },
        images_with_words,
    ),
    Family(
        "siglip",
        "vision",
        "",
        {
            "text_config": {**SMALL, "projection_size": 32},
            "vision_config": {**VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
        },
        images_with_words,
    ),
    Family(
        "mixtral",
        "mixture of experts",
        "CausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        dtype=torch.float32,
    ),
    Family(
        "qwen2_moe",
        "mixture of experts",
        "CausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        dtype=torch.float32,
    ),
    Family(
        "qwen3_moe",
        "mixture of experts",
        "CausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        dtype=torch.float32,
    ),
    Family(
        "deepseek_v3",
        "mixture of experts",
        "CausalLM",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        dtype=torch.float32,
    ),
)

"""Every architecture of transformers that can be made small: a model with random weights, and inputs of its kind.

``architectures()`` goes over transformers' own mappings from a model's type to its class. ``build`` makes the config of
the type, replaces its sizes by small ones by the names of its fields, and makes the model from it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

__all__ = ["CannotBuild", "architectures", "build", "inputs", "quiet"]

VOCABULARY, LENGTH, BATCH = 64, 11, 2
WIDTH, HEADS, WINDOW = 32, 4, 5
IMAGE, PATCH, FRAMES, SAMPLES = 32, 8, 32, 1600
MOST_PARAMETERS = 20_000_000

# What an architecture is made for, the first that it is listed under.
MAPPINGS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}

# Names of sizes, the first that matches counts; a function makes the new value from the old one.
# fmt: off
SIZES: list[tuple[str, Any]] = [
    (r".*vocab_size(_\w+)?|num_embeddings|codebook_size|n_vocab|vocab", VOCABULARY),
    (r"(num_)?(hidden_)?layers?|num_hidden_layers|n_layers?|num_(encoder|decoder)_layers|(encoder|decoder)_layers"
     r"|depth|num_blocks|(encoder|decoder)_num_hidden_layers|num_nextn_predict_layers|num_(local|adapter)_layers"
     r"|num_hidden_(groups|layers)|\w+_num_layers|num_\w+_layers", lambda old: min(old, 2)),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|attention_num_kv_heads|num_global_key_value_heads",
     lambda old: 1 if old == 1 else 2),
    (r"num_attention_heads|num_heads|n_heads?|(encoder|decoder)_attention_heads|attention_heads|heads"
     r"|(swa|linear|global)_num_attention_heads|\w+_num_attention_heads|num_\w*attention_heads", HEADS),
    (r"linear_num_(key|value)_heads|mamba_n_heads|mamba_num_heads", 4),
    (r"head_dim|d_kv|attention_head_dim|kv_channels|attention_head_size|head_size|global_head_dim|swa_head_dim"
     r"|linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim|attn_head_dim|\w+_head_dim", 8),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim", 8),
    (r"(q|kv|o)_lora_rank|\w+_lora_rank|\w*low_rank_dim", 8),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|projection_dim|d_embed|emb_dim|embedding_size|width"
     r"|word_embed_proj_dim|output_dim|output_hidden_size|out_hidden_size|embedding_dim|encoder_hidden_size"
     r"|cross_attention_hidden_size|lru_width|decoder_hidden_size|conv_dim|\w+_embed_dim|\w+_hidden_size|hidden_channels"
     r"|num_embeds|d_hidden|proj_size|entity_emb_size|text_embed_dim|bottleneck_size|intra_bottleneck_size", WIDTH),
    (r"intermediate_size|ffn_dim|d_ff|n_inner|(encoder|decoder)_ffn_dim|ffn_hidden_size|d_inner|moe_intermediate_size"
     r"|shared_expert_intermediate_size|feed_forward_hidden_size|\w+_intermediate_size|\w*ffn_dim|mlp_dim|\w+_ffn_size"
     r"|block_ff_dim|dim_feedforward|intermediate_size_mlp|ffn_size|\w*feedforward_dim", WIDTH),
    (r"num_experts_per_tok|moe_topk|num_experts_per_token|moe_k|top_k_experts|moe_top_k", lambda old: min(old, 2)),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", lambda old: min(old, 4)),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts", 1),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len|max_sequence_length|seq_length"
     r"|max_\w*positions|n_ctx|model_max_length", lambda old: old if old < 0 else 64),
    (r"sliding_window(_size)?|window_size|attention_window_size|local_attention|attention_chunk_size|swa_window_size"
     r"|sliding_window_\w+", WINDOW),
    (r"image_size|\w+_image_size", IMAGE),
    (r"patch_size|\w+_patch_size", PATCH),
    (r"num_mel_bins|num_mel_bands|n_mels|feature_size", 16),
    (r"index_topk", 4),
    (r"rotary_dim", 4),
    (r"hidden_size_per_layer_input|vocab_size_per_layer_input", 16),
    (r"num_classes|num_queries|num_latents|query_length", 8),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_d_conv_state", 8),
    (r"chunk_size|mamba_chunk_size", 8),
    (r"mamba_n_groups|n_groups", 1),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 2),
]
# fmt: on
TOKEN = re.compile(r"\w*token_(id|index)|\w*token_ids?")
# Names that the patterns above would take for sizes.
NO_SIZES = {"num_labels", "num_channels", "conv_kernel", "conv_stride", "num_feat_extract_layers", "num_conv_layers"}
# What an architecture's config asks for beyond the rules.
MAMBA = {"mamba_n_heads": 8, "mamba_d_ssm": 64}
ALPHABET = {"vocab_size": VOCABULARY}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
SHIFTED = {
    "window_size": 2,
    "image_size": 32,
    "patch_size": 2,
    "depths": [1, 2, 1],
    "num_heads": [2, 2, 4],
    "embed_dim": 16,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "deepseek_v2": EXPERTS,
    "donut-swin": SHIFTED,
    "dots1": {**EXPERTS, "n_shared_experts": 1},
    "esm": {**ALPHABET, "pad_token_id": 0, "mask_token_id": 3},
    "falcon_h1": MAMBA,
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": SHIFTED,
    "swinv2": SHIFTED,
    "wav2vec2-bert": {**ALPHABET, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": ALPHABET,
    "xmod": {"default_language": "en_XX"},
}


class CannotBuild(Exception):  # noqa: N818
    """Why no small model of an architecture was made."""


def architectures() -> dict[str, tuple[str, str]]:
    """{model type: (what it is for, the name of its class)}, in the order of the alphabet."""
    kinds: dict[str, tuple[str, str]] = {}
    for purpose, mapping in MAPPINGS.items():
        for kind, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            kinds.setdefault(kind, (purpose, name))
    return dict(sorted(kinds.items()))


def config_of(kind: str) -> Any:
    """The architecture's config, with small sizes."""
    own = getattr(folder_of(kind), configuration_auto.CONFIG_MAPPING_NAMES[kind])
    return shrunk(own, OVERRIDES.get(kind, {}))


def folder_of(kind: str) -> Any:
    """The package of transformers that holds the architecture."""
    return importlib.import_module(f"transformers.models.{configuration_auto.model_type_to_module_name(kind)}")


def shrunk(own: Any, overrides: dict[str, Any]) -> Any:
    """A config of the class with its sizes replaced by small ones, those of its sub-configs too."""
    plain = own()
    old = plain.to_dict()
    values: dict[str, Any] = {}
    for name in getattr(own, "sub_configs", {}):
        sub = getattr(plain, name, None)
        if sub is not None and not isinstance(sub, dict):
            values[name] = shrunk(type(sub), overrides.get(name, {})).to_dict()
            if "siglip" in type(sub).model_type and "siglip" not in own.model_type:
                # The published models leave out the tower's pooling.
                values[name]["vision_use_head"] = False
    for name, value in old.items():
        new = None if name in values or name in NO_SIZES else small(name, value)
        if new is not None:
            values[name] = new
    for heads in ("num_attention_heads", "num_heads"):
        if heads in values and old.get("num_key_value_heads") == old[heads]:
            values["num_key_value_heads"] = HEADS
    set_layer_types(own, plain, values)
    set_rotary_sections(old, values)
    values.update({key: value for key, value in overrides.items() if key not in getattr(own, "sub_configs", {})})
    return own(**values)


def set_rotary_sections(old: dict[str, Any], values: dict[str, Any]) -> None:
    """Rotary positions of time, height and width share the width of a head."""
    rope = old.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        rotated = rope.get("partial_rotary_factor", old.get("partial_rotary_factor") or 1.0)
        values["rope_parameters"] = dict(rope, mrope_section=[2, 1, 1] if rotated == 1 else [1, 1, 0])


def set_layer_types(own: Any, plain: Any, values: dict[str, Any]) -> None:
    """As many layers as there are kinds of layers, at least two, with one entry each in the lists that name kinds."""
    count = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), None)
    columns = {
        name: value
        for name, value in plain.to_dict().items()
        if isinstance(value, (list, tuple)) and not isinstance(getattr(own, name, None), property)
    }
    lists = [name for name, value in columns.items() if count and len(value) == getattr(plain, count) > 2]
    if not lists:
        return
    rows = list(zip(*(columns[name] for name in lists), strict=True))
    kinds = sorted({str(row): row for row in reversed(rows)}.values(), key=rows.index)[:4]
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    values[count] = len(kinds)
    for name, column in zip(lists, zip(*kinds, strict=True), strict=True):
        values[name] = [new if (new := small(name, item)) is not None else item for item in column]


def small(name: str, old: Any) -> Any:
    """The small value of a config's field; None where it stays."""
    if TOKEN.fullmatch(name):
        return 3 if isinstance(old, int) and not isinstance(old, bool) and old >= VOCABULARY else None
    for pattern, new in SIZES:
        if re.fullmatch(pattern, name):
            if isinstance(old, bool) or old is None:
                return None
            if isinstance(old, int):
                return new(old) if callable(new) else new
            if isinstance(old, (list, tuple)) and old and all(type(item) is int for item in old):
                return type(old)(new(item) if callable(new) else new for item in old)
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(kind: str) -> Any:
    """A small model of the architecture in evaluation mode; CannotBuild says why there is none."""
    _, name = architectures()[kind]
    try:
        with quiet():
            config = config_of(kind)
            own = getattr(folder_of(kind), name)
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in own(config).parameters())
            if count > MOST_PARAMETERS:
                raise CannotBuild(f"{count:,} parameters after shrinking")
            torch.manual_seed(7)
            model = own(config).eval()
    except Exception as error:
        raise CannotBuild(" ".join(f"{type(error).__name__}: {error}".split())) from error
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                # Fixed position tables are no weights.
                continue
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * max(25, parameter.shape[1:].numel()) ** -0.5)
            else:
                # Gates and temperatures may start at zero, where attention does not count.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Batches of the kinds that the model may take."""
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    text = {"input_ids": tokens(LENGTH)}
    target = {"decoder_input_ids": tokens(7, seed=5)} if "decoder_input_ids" in names else {}
    image = noise(BATCH, size(model, "num_channels", 3), *pair(size(model, "image_size", IMAGE)))
    if "input_ids" in names:
        if "pixel_values" in names and "vision_config" in model.config.sub_configs:
            yield {**text, "pixel_values": image}
        yield {**text, **target}
        if "bbox" in names:
            yield {**text, "bbox": torch.arange(4).expand(BATCH, LENGTH, 4)}
        if "pixel_values" in names:
            yield {**text, "pixel_values": image}
    if "pixel_values" in names:
        yield {"pixel_values": image, **target}
        yield {"pixel_values": noise(BATCH, size(model, "num_frames", 4), *image.shape[1:]), **target}
    if "pixel_values_videos" in names:
        yield {"pixel_values_videos": noise(BATCH, size(model, "num_frames", 4), *image.shape[1:]), **target}
    if "grid_thw" in names:
        first = next(iter(names))
        patches = 3 * size(model, "temporal_patch_size", 2) * size(model, "patch_size", PATCH) ** 2
        yield {first: noise(16 + 32, patches), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]])}
    if main in ("input_features", "input_values"):
        bands = size(model, "num_mel_bins", None) or size(model, "input_feat_per_channel", 16)
        for length in (FRAMES, 2 * size(model, "max_source_positions", FRAMES), 64):
            for shape in ((BATCH, bands, length), (BATCH, length, bands)):
                yield {main: noise(*shape), **target}
                mask = f"{main}_mask"
                if mask in names:
                    yield {main: noise(*shape), mask: torch.ones(BATCH, length, dtype=torch.bool), **target}
        yield {main: noise(BATCH, SAMPLES), **target}
        yield {main: noise(BATCH, 1, SAMPLES), **target}


def size(model: Any, name: str, default: Any) -> Any:
    """A field of the model's config, or of one of its sub-configs."""
    config = model.config
    configs = (config, *(getattr(config, sub, None) for sub in getattr(config, "sub_configs", {})))
    return next((value for one in configs if (value := getattr(one, name, None)) is not None), default)


def pair(side: Any) -> tuple[int, ...]:
    return (side, side) if isinstance(side, int) else tuple(side)


def tokens(length: int, *, seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY - 4, (BATCH, length), generator=generator)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(13))


def inputs(model: Any) -> dict[str, Tensor]:
    """A batch that the model takes: the first of the candidates with which it runs."""
    first: Exception | None = None
    for batch in candidates(model):
        try:
            with torch.no_grad(), quiet():
                model(**batch)
            return batch
        except Exception as error:
            first = first or error
    raise CannotBuild(" ".join(f"no batch that it takes: {type(first).__name__}: {first}".split()))

"""A model, its tokenizer and what it was made for, from a folder or a hub name; never from a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlab.adapters.gguf import is_gguf, load_gguf
from attnlab.adapters.hub import hub_or_its_cache
from attnlab.adapters.hugging_face import CONTAINER
from attnlab.adapters.model_files import (
    check_config,
    check_layer_count,
    check_weights,
    refuse_layers_without_place,
    weight_files,
)
from attnlab.adapters.named_models import SHIPPED_MODELS, ShippedModel, named_model_file, shipped_folder
from attnlab.adapters.own_checkpoints import Task, is_own_checkpoint, load_own_checkpoint, own_max_length, own_task
from attnlab.adapters.stored_conversion import reconvert
from attnlab.adapters.tokenizer_files import load_tokenizer, quiet_transformers
from attnlab.errors import PythonRemedyError, first_line, refusal
from attnlab.fields import expect
from attnlab.models import Transformer, save_transformer

__all__ = [
    "SHIPPED",
    "LoadedModel",
    "Task",
    "as_loaded",
    "check_length",
    "load_model",
    "max_length",
    "save_model",
    "shipped_model",
]

# The small masked language model that comes with the package.
SHIPPED = shipped_folder("mlm")

# Where a name that is no folder was looked for.
HUB, CACHE = "on the hub", "in the cache of the hub, which is out of reach"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "words.json",
    "*.model",
    "*.spm",
)


class LoadedModel(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the task of its head ("encoder": no head over the vocabulary)."""

    model: Any
    tokenizer: Any
    task: Task


def shipped_model(name: str = "mlm") -> LoadedModel:
    """A small model that comes with the package: "mlm", "lm" or "lm-bounded".

    "mlm" is a masked language model, "lm" a causal one, "lm-bounded" the causal one with a memory of constant size: its
    weights are the same, and only which keys stay was learned. ``load_model`` and the command line know them as
    shipped-mlm, shipped-lm and shipped-lm-bounded.
    """
    shipped = SHIPPED_MODELS.get(f"shipped-{name}")
    if shipped is None:
        names = ", ".join(known.removeprefix("shipped-") for known in SHIPPED_MODELS)
        raise ValueError(f"there is no shipped model {name!r}; there are: {names}")
    return _load_shipped(shipped, torch.float32)


def _load_shipped(shipped: ShippedModel, dtype: torch.dtype | None) -> LoadedModel:
    loaded = load_model(shipped_folder(shipped.weights), dtype=dtype)
    if shipped.conversion is not None:
        reconvert(loaded.model, shipped_folder(shipped.conversion))
    return loaded


def load_model(
    path_or_hub_name: str | Path,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> LoadedModel:
    """Load a folder or a hub name with safetensors weights, a GGUF file, or a model by its short name.

    Short names are "smollm2", and "shipped-mlm", "shipped-lm" and "shipped-lm-bounded" (``shipped_model``).

    Models of transformers, those of ``attnlab.models``, and what ``attnlab train`` wrote. A missing or damaged file is
    a ValueError of one sentence. ``dtype=None`` keeps the checkpoint's own; GGUF weights are dequantised to float32
    then. A model that was converted comes back converted.
    """
    shipped = SHIPPED_MODELS.get(str(path_or_hub_name))
    if shipped is not None and not Path(path_or_hub_name).exists():
        return _load_shipped(shipped, dtype)
    file = _gguf_file(str(path_or_hub_name))
    if file is not None:
        with quiet_transformers():
            model, tokenizer = load_gguf(file, dtype=dtype)
        check_weights(str(file), model)
        return LoadedModel(model.eval(), tokenizer, "seq2seq" if model.config.is_encoder_decoder else "causal")
    name = _checked_name(str(path_or_hub_name))
    if is_own_checkpoint(Path(name)):
        return LoadedModel(*load_own_checkpoint(Path(name), dtype=dtype))
    if Path(name).exists():
        return _load_transformers(name, trust_remote_code=trust_remote_code, dtype=dtype)
    with hub_or_its_cache() as reached:
        return _load_transformers(name, trust_remote_code=trust_remote_code, dtype=dtype, hub=HUB if reached else CACHE)


def _load_transformers(
    name: str, *, trust_remote_code: bool, dtype: torch.dtype | None, hub: str | None = None
) -> LoadedModel:
    """A model of transformers from a folder that was checked, or by a name that is looked for where ``hub`` says."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        # What is looked for on the hub may be the misspelt name of a folder.
        folder, where = ("", "") if hub is None else ("no such folder here, and ", f" {hub}")
        raise refusal(error, f"{name}: {folder}no usable model config{where} ({first_line(error)})") from None
    cls, task = _class_and_task(config)
    section = getattr(config, CONTAINER, None)
    try:
        with quiet_transformers(errors_only=section is not None):
            model, info = cls.from_pretrained(
                name,
                config=config,
                use_safetensors=True,
                dtype="auto" if dtype is None else dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:
        raise refusal(error, f"{name}: its weights cannot be loaded as {cls.__name__} ({first_line(error)})") from None
    model, task, missing = _without_absent_parts(model, task, set(info["missing_keys"]))
    if missing:
        raise ValueError(f"{name}: its weights lack {len(missing)} tensors, such as {min(missing)}")
    new = sorted(key for key in info["unexpected_keys"] if key.startswith(f"{CONTAINER}."))
    if section is None and new:
        raise ValueError(
            f"{name}: its weights hold the parameters of a conversion ({new[0]}), but its config.json lacks the "
            f"section {CONTAINER!r} that says which layers attend by what; copy config.json again from where it was "
            "saved"
        )
    refuse_layers_without_place(name, model, info["unexpected_keys"])
    check_weights(name, model)
    if section is not None:
        try:
            reconvert(model, name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    return LoadedModel(model.eval(), tokenizer, task)


def as_loaded(model: Any, tokenizer: Any) -> LoadedModel:
    """A model and a tokenizer that are in memory, with the task that the model's class says, as ``load_model`` does."""
    if isinstance(model, Transformer):
        return LoadedModel(model, tokenizer, own_task(model.config))
    return LoadedModel(model, tokenizer, _task_of(type(model).__name__, getattr(model, "config", None)))


def save_model(loaded: LoadedModel, folder: Path | str) -> Path:
    """Write a model and its tokenizer so that ``load_model`` reads both again; converted ones stay converted."""
    expect("loaded", loaded, LoadedModel, "what load_model returns")
    expect("folder", folder, (str, Path), "the path of a folder")
    if not hasattr(loaded.tokenizer, "save_pretrained"):
        raise ValueError(f"a tokenizer of transformers can be saved, got {type(loaded.tokenizer).__name__}")
    if isinstance(loaded.model, Transformer):
        save_transformer(loaded.model, folder)
    else:
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return Path(folder)


def _gguf_file(name: str) -> Path | None:
    """The GGUF file that a name means: a path, or a short name; None where it means something else."""
    local = Path(name).expanduser()
    file = local if local.exists() else named_model_file(name)
    return file if file is not None and is_gguf(file) else None


def _checked_name(name: str) -> str:
    """The folder of a model, whose files are checked, or a hub name as it is."""
    local = Path(name).expanduser()
    if not local.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"{name}: there is no such folder")
        return name
    # A run's model is in a folder of its own.
    if not (local / "config.json").exists() and (local / "model" / "config.json").is_file():
        local /= "model"
    _check_folder(local)
    return str(local)


def _without_absent_parts(model: Any, task: Task, missing: set[str]) -> tuple[Any, Task, set[str]]:
    """The model without a pooler or a head that its checkpoint lacks as a whole, and the tensors that still lack.

    Attention needs neither. Sentence encoders are often saved without a pooler, and under the class of the masked
    language model that they were trained from.
    """
    base = model.base_model
    if missing and base is not model and task in ("mlm", "encoder"):
        prefix = f"{model.base_model_prefix}."
        head = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}
        if head and head <= missing:
            model, task = base, "encoder"
            missing = {key.removeprefix(prefix) for key in missing if key.startswith(prefix)}
    pooler = getattr(model.base_model, "pooler", None)
    if isinstance(pooler, torch.nn.Module):
        prefix = "pooler." if model.base_model is model else f"{model.base_model_prefix}.pooler."
        absent = {prefix + name for name, _ in pooler.named_parameters()}
        if absent and absent <= missing:
            model.base_model.pooler = None
            missing -= absent
    return model, task, missing


def max_length(model: Any) -> int | None:
    """The longest sequence the model has positions for; None where they are relative or the config does not say."""
    if isinstance(model, Transformer):
        return own_max_length(model.config)
    config = getattr(model.config, "text_config", model.config)
    if getattr(config, "relative_attention_num_buckets", None) is not None:
        return None
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    for name, module in model.named_modules():
        # RoBERTa numbers its positions from padding_idx + 1.
        if name.endswith("embeddings.position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1
    return limit


def check_length(model: Any, length: int) -> None:
    """Raise a ValueError if a sequence of ``length`` tokens is longer than the model's positions."""
    limit = max_length(model)
    if limit is not None and length > limit:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the {limit} positions of {type(model).__name__}; cut it"
        )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder that holds config.json and model.safetensors")
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} holds no config.json, so it is no model folder")
    values, shards = check_config(config), weight_files(folder)
    for shard in shards:
        _check_safetensors(shard)
    check_layer_count(folder, values, shards)
    if not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise PythonRemedyError(
            f"{folder} holds no tokenizer (tokenizer.json or the like)", remedy="save one there with save_pretrained"
        )


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or damaged ({first_line(error)}); copy it again") from None


def _class_and_task(config: Any) -> tuple[Any, Task]:
    """The class the checkpoint was saved from, so that no head is made up; the task by its name."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    task = _task_of(name, config)
    auto = {
        "mlm": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "causal": transformers.AutoModelForCausalLM,
        "encoder": transformers.AutoModel,
    }[task]
    if task == "mlm" and name.endswith("ForPreTraining"):
        return auto, task
    return getattr(transformers, name, None) or auto if name else auto, task


def _task_of(name: str, config: Any) -> Task:
    """The task of a class of transformers, by its name."""
    if name.endswith("ForMaskedLM"):
        return "mlm"
    # BERT's pretraining model is its masked language model with a sentence classifier beside it; ELECTRA's is not.
    if name.endswith("ForPreTraining") and name.startswith(("Bert", "MobileBert", "Albert")):
        return "mlm"
    if getattr(config, "is_encoder_decoder", False) and name.endswith(("ForConditionalGeneration", "MTModel")):
        return "seq2seq"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "encoder"

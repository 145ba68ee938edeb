"""Models in GGUF files (llama.cpp's format), dequantised to ordinary weights by transformers."""

from __future__ import annotations

import copy
import functools
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attnlab.errors import first_line, refusal

__all__ = ["is_gguf", "load_gguf"]

MAGIC = b"GGUF"
SEQ2SEQ = ("t5", "umt5")
# The fields of a tokenizer that name a special token, and the metadata of a GGUF file that holds its number.
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def is_gguf(path: Path) -> bool:
    """Whether a file is meant as GGUF: by its name, or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def load_gguf(path: Path, *, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF file, as if they came from a folder of safetensors.

    A damaged file, an architecture that transformers does not read and a missing package are ValueErrors of one line.
    """
    import transformers

    with _read_once(path):
        architecture, special = _header(path)
        folder, name = str(path.parent), path.name
        auto = transformers.AutoModelForSeq2SeqLM if architecture in SEQ2SEQ else transformers.AutoModelForCausalLM
        try:
            model = auto.from_pretrained(folder, gguf_file=name, dtype=torch.float32 if dtype is None else dtype)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        except Exception as error:
            raise refusal(error, f"{path}: transformers cannot load it ({first_line(error)})") from None
    model = _without_quantisation(model)
    for field, number in special.items():
        # transformers 5.17 gives the end of a text the number of its beginning (integrations/ggml.py).
        setattr(tokenizer, field, tokenizer.convert_ids_to_tokens(number))
    # transformers warns at every decoding that it ignores the other setting.
    tokenizer.clean_up_tokenization_spaces = False
    return model, tokenizer


@contextmanager
def _read_once(path: Path) -> Iterator[None]:
    """Inside the context, a GGUF file is read once: transformers reads its header, which takes seconds, four times.

    The progress bar of the reading is shown on a terminal only.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} is no GGUF file: its first four bytes are not {MAGIC.decode()}")
    try:
        import gguf
    except ImportError:
        raise ValueError(
            f"{path} is a GGUF file, and the package that reads those is missing: pip install gguf"
        ) from None
    with ExitStack() as undo:
        for name in ("GGUFReader", "get_tensor_name_map"):
            undo.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        if not sys.stderr.isatty():
            undo.enter_context(redirect_stderr(io.StringIO()))
        yield


def _header(path: Path) -> tuple[str, dict[str, int]]:
    """The architecture and the special tokens that the file names; reading them also tells whether it is whole."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
        numbers = {field: reader.get_field(key) for field, key in SPECIAL_TOKENS.items()}
        special = {field: int(number.contents()) for field, number in numbers.items() if number is not None}
        return str(reader.fields["general.architecture"].contents()), special
    except Exception as error:
        raise refusal(error, f"{path} is truncated or damaged ({first_line(error)}); copy it again") from None


def _without_quantisation(model: Any) -> Any:
    """The same weights in a model that no longer says that it is quantised: it can be trained, converted and saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    for (_, buffer), (name, empty) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        if empty.is_meta:
            holder, _, last = name.rpartition(".")
            setattr(plain.get_submodule(holder), last, buffer)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()

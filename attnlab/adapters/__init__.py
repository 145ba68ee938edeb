"""Models made to attend by other mechanisms, recorded, converted and decoded with bounded caches.

``swap``, ``record``, ``convert``, ``evicting``, ``guide`` and the readings take any model that has an adapter
(``protocol.adapter_of``): Hugging Face models (``hugging_face``; ``outside_interface`` for those that attend by code of
their own) and modules with our attention layers (``own_models``).
``load`` reads Hugging Face models, converted ones too, from folders and the hub, and our own from folders
(``own_checkpoints``); ``generate`` continues a text with either.

What happens when ``al.convert(model, "abc-mlp")`` is followed by ``model.generate(...)`` on a Hugging Face model:

1. ``convert`` selects the sites (``protocol``) and groups them: layers of a kind share a tied mechanism.
2. ``hugging_face`` installs the mechanisms in the attention modules, makes every config name our attention function,
   runs the model once so that parameters are made, and puts them into ``model.attnlab``.
3. In ``generate`` each attention module projects q, k, v, and transformers looks up its attention function by the
   config's name: ``attention_function``. A hook has kept the module's hidden states, and has put a
   ``memory_cache.MemoryLayer`` into the cache in place of keys and values.
4. ``calls.make_call`` turns the arguments into an ``AttentionCall``; ``masks`` finds padding and causality in the mask.
5. ``MemoryLayer.answer`` folds the new keys into the mechanism's own bounded memory (its ``make_cache``) and returns
   the output.

A swap differs in step 2, where a context adds a frame to each site instead, and in step 5, where the mechanism itself
answers the call over the keys in the model's own cache. A recorder is a frame too: it notes each call and its output.

Our Transformer needs no function in between: a converted layer's mechanism is its submodule, a swapped one's stands in
``AttentionLayer.replacements``, and ``models/attention.py`` makes the call, from step 4 on.
"""

from attnlab.adapters.contexts import record, swap
from attnlab.adapters.convert import convert, is_converted
from attnlab.adapters.distillation import Distillation, distill
from attnlab.adapters.evict import evicting
from attnlab.adapters.generate import generate
from attnlab.adapters.load import LoadedModel, load_model, save_model, shipped_model
from attnlab.adapters.plan import Plan, swap_plan
from attnlab.adapters.protocol import adapter_of
from attnlab.adapters.stored_conversion import reconvert, save_conversion

__all__ = [
    "Distillation",
    "LoadedModel",
    "Plan",
    "adapter_of",
    "convert",
    "distill",
    "evicting",
    "generate",
    "is_converted",
    "load_model",
    "reconvert",
    "record",
    "save_conversion",
    "save_model",
    "shipped_model",
    "swap",
    "swap_plan",
]

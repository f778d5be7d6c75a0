"""The last layer of an encoder whose classifier reads its first token alone: of that token alone.

What the last layer makes of the other tokens is read by nobody, and no gradient comes from there.
Left out, it is most of a layer less: of MiniLM's six a seventh of the work. Logits and gradients
are the same to rounding; dropout draws fewer masks.

All tokens see the same padding, so that a mask of one row does for all: transformers makes one of S
rows, and has the host wait for the device to say whether any token is padding at all.

Legend: B samples, S tokens.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from accel_ft.model.attention import self_attention

KINDS = {"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"}


def leave_out_the_rest(model: Any) -> None:
    """Let the last layer of a plain `...ForSequenceClassification` compute the first token alone,
    where it is of a kind whose classifier reads no other. Its last hidden states are [B, 1, hidden
    size] then. Where it computes attention eagerly, as on a CPU that trains, all its layers do so
    as `attention.py` says.

    To be called once, before anything wraps the model.
    """
    config = model.config
    attention_path = config._attn_implementation
    if (
        config.model_type not in KINDS
        or not type(model).__module__.startswith("transformers.")  # pools as its author likes
        or getattr(config, "is_decoder", False)
        or getattr(config, "chunk_size_feed_forward", 0) > 1  # of which one token is no multiple
        or config.num_hidden_layers < 1
        or attention_path not in ("eager", "sdpa")
    ):
        return
    base = model.base_model
    layers = (base.transformer if config.model_type == "distilbert" else base.encoder).layer
    for layer in layers if attention_path == "eager" else layers[-1:]:
        attention = getattr(layer.attention, "self", layer.attention)
        attention.forward = partial(self_attention, attention)  # a method would not be unpickled
    layers[-1].register_forward_pre_hook(_first_token, with_kwargs=True)
    base.register_forward_pre_hook(_one_row, with_kwargs=True)


def _one_row(base: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the mask [B, S] one that transformers takes as it is, [B, 1, 1, S]: bool for SDPA, to be
    added for eager attention.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        mask = mask.bool()[:, None, None]
        if base.config._attn_implementation == "eager":
            least = torch.finfo(base.dtype).min
            mask = torch.zeros_like(mask, dtype=base.dtype).masked_fill_(~mask, least)
        kwargs = {**kwargs, "attention_mask": mask}
    return args, kwargs


def _first_token(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer the first token; the others only through `self_attention`, to which it passes
    what it does not know.
    """
    tokens, *others = args
    return (tokens[:, :1], *others), {**kwargs, "all_tokens": tokens}

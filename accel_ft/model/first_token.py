"""The last layer of an encoder whose classifier reads its first token alone: of that token alone.

What the last layer makes of the other tokens is read by nobody, and no gradient comes from there.
Left out, it is most of a layer less: of MiniLM's six a seventh of the work. Logits and gradients
are the same to rounding; dropout draws fewer masks.

All tokens see the same padding, so that a mask of one row does for all: transformers makes one of S
rows, and has the host wait for the device to say whether any token is padding at all.

Legend: B samples, S tokens.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

KINDS = {"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"}
PROJECTIONS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))  # DistilBERT's


def leave_out_the_rest(model: Any) -> None:
    """Let the last layer of a plain `...ForSequenceClassification` compute the first token alone,
    where it is of a kind whose classifier reads no other. Its last hidden states are [B, 1, hidden
    size] then.

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
    last = (base.transformer if config.model_type == "distilbert" else base.encoder).layer[-1]
    attention = getattr(last.attention, "self", last.attention)
    last.register_forward_pre_hook(_first_token, with_kwargs=True)
    attention.forward = partial(_attend, attention)  # a method would not be unpickled
    if attention_path == "sdpa":
        base.register_forward_pre_hook(_one_row, with_kwargs=True)


def _one_row(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the mask [B, S] one that transformers takes as it is, bool [B, 1, 1, S]."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        kwargs = {**kwargs, "attention_mask": mask.bool()[:, None, None]}
    return args, kwargs


def _first_token(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer the first token; the others only through `_attend`, to which it passes what it
    does not know.
    """
    tokens, *others = args
    return (tokens[:, :1], *others), {**kwargs, "all_tokens": tokens}


def _attend(
    self: Any,
    first: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    all_tokens: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward pass of self-attention, but for which tokens ask.

    Args:
        first: [B, 1, hidden size].
        attention_mask: added to the scores, [B, 1, S, S]; or what may be seen, bool [B, 1, 1, S].
        all_tokens: [B, S, hidden size].
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = next(names for names in PROJECTIONS if hasattr(self, names[0]))
    query, key, value = (
        getattr(self, name)(tokens)
        .view(tokens.shape[0], tokens.shape[1], -1, self.attention_head_size)
        .transpose(1, 2)
        for name, tokens in zip(names, (first, all_tokens, all_tokens), strict=True)
    )
    eager = next(  # in the module of its class, or, where FSDP2 has made that another, of its base
        module.eager_attention_forward
        for kind in type(self).__mro__
        if hasattr(module := sys.modules[kind.__module__], "eager_attention_forward")
    )
    path = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    attended, weights = path(
        self,
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, :, :1],
        dropout=self.dropout.p if self.training else 0.0,
        scaling=self.scaling,
        **kwargs,
    )
    attended = attended.reshape(*first.shape[:-1], -1)
    return (self.out_lin(attended) if hasattr(self, "out_lin") else attended), weights

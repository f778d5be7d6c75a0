"""The last layer of an encoder whose classifier reads its first token alone: of that token alone.

What the last layer makes of the other tokens is read by nobody, and no gradient comes from there.
Left out, it is all but a layer less: of MiniLM's six a sixth of the work. Logits and gradients are
the same to rounding; dropout draws fewer masks.

Of the other tokens not even keys and values are made. A score is query x (K token), which is
(K^T query) x token; and what the token gets, the sum of shares x (V token), is V x the sum of
shares x token. So the matrices K and V, of each head, meet one vector a sample, where they met S.

All tokens see the same padding, so that a mask of one row does for all: transformers makes one of S
rows, and has the host wait for the device to say whether any token is padding at all.

Legend: B samples, H heads, S tokens, D hidden size.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from accel_ft.model.layer import attention_of, projections, unpacked, use_fused_layer

KINDS = {"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"}


def reads_first_token(model: Any) -> bool:
    """Return whether a plain `...ForSequenceClassification` is of a kind whose classifier reads the
    first token alone, and computes as is known here.
    """
    config = model.config
    return (
        config.model_type in KINDS
        and type(model).__module__.startswith("transformers.")  # others pool as their author likes
        and not getattr(config, "is_decoder", False)
        and getattr(config, "chunk_size_feed_forward", 0) <= 1  # of which one token is no multiple
        and config.num_hidden_layers >= 1
        and config._attn_implementation in ("eager", "sdpa")
    )


def compute_first_token_only(model: Any, last_alone: bool = False) -> None:
    """Let the last layer of a classifier compute the first token alone, where it reads no other.
    Its last hidden states are [B, 1, D] then. Where attention is eager, as on a CPU that trains,
    its other layers do as `layer.py` says, and hand on [N, D], without padding; elsewhere they do
    as `fused_qkv_attention` says.

    To be called once, before anything wraps the model.

    Args:
        model: a plain one.
        last_alone: leave the other layers as their class has them: compiled layer by layer, one
            does for all.
    """
    if not reads_first_token(model):
        return
    config, base = model.config, model.base_model
    attention_path = config._attn_implementation
    layers = (base.transformer if config.model_type == "distilbert" else base.encoder).layer
    for layer in () if last_alone else layers[:-1]:
        if attention_path == "eager":
            use_fused_layer(layer, packs=True)
        else:
            others = attention_of(layer)
            others.forward = partial(fused_qkv_attention, others)
    attention = attention_of(layers[-1])
    attention.forward = partial(first_token_attention, attention)  # a method would not be unpickled
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


def _first_token(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer the first token; the others only through `first_token_attention`, to which it
    passes what it does not know.
    """
    tokens, *others = args
    tokens = unpacked(layer, tokens, others[0] if others else kwargs.get("attention_mask"))
    return (tokens[:, :1], *others), {**kwargs, "all_tokens": tokens}


def first_token_attention(
    self: Any,
    token: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    all_tokens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of the last layer's module of self-attention.

    Args:
        self: the module.
        token: that asks, [B, 1, D].
        attention_mask: added to the scores, or bool, what may be seen; [B, 1, 1, S], or with a row
            for each token.
        all_tokens: that are asked, [B, S, D].

    Returns:
        What the module returns: [B, 1, D], and the weights, [B, H, 1, S].
    """
    device, size = token.device.type, self.attention_head_size
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):  # once, for all products
        all_tokens = all_tokens.to(torch.get_autocast_dtype(device))
    query, key, value = projections(self)
    has_adapters = type(key) is not nn.Linear or type(value) is not nn.Linear
    by_head, of_head = (*all_tokens.shape[:2], -1, size), (-1, size, all_tokens.shape[2])
    asked = query(all_tokens[:, :1]).view(token.shape[0], -1, size).transpose(0, 1)  # [H, B, size]
    if has_adapters:
        scores = torch.einsum("hbd,bshd->bhs", asked, key(all_tokens).view(by_head))
    else:
        asks = (asked @ key.weight.view(of_head)).transpose(0, 1)  # [B, H, D]
        scores = asks @ all_tokens.mT  # [B, H, S]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not has_adapters:  # the same for all tokens: softmax takes it away, its gradient is 0
        scores = scores + (asked @ key.bias.view(-1, size, 1)).transpose(0, 1)
    scores = scores * self.scaling
    if attention_mask is not None:
        mask, least = attention_mask[:, :, 0], torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
        scores = scores.clamp(min=least)  # a mask in 16 bits may have come to -inf
    shares = F.dropout(scores.softmax(-1), self.dropout.p, self.training)  # [B, H, S]
    drawn = shares.to(all_tokens.dtype)
    if has_adapters:
        got = torch.einsum("bhs,bshd->hbd", drawn, value(all_tokens).view(by_head))
    else:
        got = (drawn @ all_tokens).transpose(0, 1) @ value.weight.view(of_head).mT
        got = got + shares.sum(-1).T[..., None] * value.bias.view(-1, 1, size)  # [H, B, size]
    attended = got.transpose(0, 1).reshape(token.shape[0], 1, -1).to(all_tokens.dtype)
    return (self.out_lin(attended) if hasattr(self, "out_lin") else attended), shares[:, :, None]


def fused_qkv_attention(
    self: Any,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *others: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward pass of another layer's module of self-attention: query, key and value in one
    product. Autocast casts the tokens once, where it keeps a copy for each of three products; one
    adds up their gradient, where three were cast back and added.

    Args:
        self: the module.
        tokens: [B, S, D].
        attention_mask: bool, what may be seen; of a shape that broadcasts to [B, H, S, S].
        others: for the class alone, which computes where there are adapters, or another attention
            is asked for since.
        kwargs: for the attention.

    Returns:
        What the module returns: [B, S, D], and the weights, if they are asked for.
    """
    modules = projections(self)
    is_plain = all(type(module) is nn.Linear for module in modules)
    if others or not is_plain or self.config._attn_implementation != "sdpa":
        given: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(
            self, tokens, attention_mask, *others, **kwargs
        )
        return given
    weight = torch.cat([module.weight for module in modules])
    made = F.linear(tokens, weight, torch.cat([module.bias for module in modules]))
    by_head = made.view(*tokens.shape[:2], 3, -1, self.attention_head_size)
    query, key, value = (each.transpose(1, 2) for each in by_head.unbind(2))
    dropped = self.dropout.p if self.training else 0.0
    attended, weights = sdpa_attention_forward(
        self, query, key, value, attention_mask, dropout=dropped, scaling=self.scaling, **kwargs
    )
    attended = attended.flatten(2)
    return (self.out_lin(attended) if hasattr(self, "out_lin") else attended), weights

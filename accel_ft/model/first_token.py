"""Computes an encoder's last layer for the first token only, where the classifier reads no other.

Nothing reads the last layer's output for the other tokens, and no gradient comes from it. Skipping
it saves almost a whole layer: of MiniLM's six, a sixth of the work. Logits and gradients are the
same up to rounding; dropout draws fewer masks.

Without adapters, keys and values are not computed either. A score, query x (K token), equals
(K^T query) x token. The attention output, the sum of probs x (V token), equals V x the sum of
probs x token. So each head multiplies K and V by one vector per sample, instead of by S.

All tokens see the same padding, so a mask of one row is enough. transformers makes S rows, and
syncs the host with the device to find out whether any token is padding.

Legend: B samples, H heads, S tokens, D hidden size; probs are the attention probabilities.
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
    first token alone, and is configured as this module supports.
    """
    config = model.config
    return (
        config.model_type in KINDS
        and type(model).__module__.startswith("transformers.")  # custom code may pool otherwise
        and not getattr(config, "is_decoder", False)
        and getattr(config, "chunk_size_feed_forward", 0) <= 1  # else 1 token is no multiple of it
        and config.num_hidden_layers >= 1
        and config._attn_implementation in ("eager", "sdpa")
    )


def compute_first_token_only(model: Any, last_alone: bool = False) -> None:
    """Make a classifier's last layer compute the first token only, if the head reads no other. The
    last hidden states are then [B, 1, D]. With eager attention, as in training on a CPU, the
    other layers use `use_fused_layer` and pass on [N, D], without padding; with SDPA they use
    `fused_qkv_attention`.

    Call once, before anything wraps the model.

    Args:
        model: a plain one.
        last_alone: leave the other layers unchanged: for FSDP with SDPA, and for compiling layer by
            layer, where one compilation then serves them all.
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
    attention.forward = partial(first_token_attention, attention)  # a method would not unpickle
    layers[-1].register_forward_pre_hook(_first_token, with_kwargs=True)
    base.register_forward_pre_hook(_one_row, with_kwargs=True)


def _one_row(base: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Expand the mask [B, S] to [B, 1, 1, S], which transformers uses unchanged: bool for SDPA,
    additive for eager attention.
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
    """Give a layer the first token only. All tokens are a keyword argument, which the layer passes
    on, unused, to `first_token_attention`.
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
    """Forward pass of the last layer's self-attention module.

    Args:
        self: the module.
        token: the query token, [B, 1, D].
        attention_mask: added to the scores, or bool, True for tokens to attend to; [B, 1, 1, S], or
            with one row per token.
        all_tokens: the tokens attended to, [B, S, D].

    Returns:
        What the module returns: output, [B, 1, D], and attention weights, [B, H, 1, S].
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
    if not has_adapters:  # softmax cancels the key bias; added so that it gets its gradient, 0
        scores = scores + (asked @ key.bias.view(-1, size, 1)).transpose(0, 1)
    scores = scores * self.scaling
    if attention_mask is not None:
        mask, least = attention_mask[:, :, 0], torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
        scores = scores.clamp(min=least)  # a 16-bit mask may hold -inf
    probs = F.dropout(scores.softmax(-1), self.dropout.p, self.training)  # [B, H, S]
    dropped = probs.to(all_tokens.dtype)
    if has_adapters:
        got = torch.einsum("bhs,bshd->hbd", dropped, value(all_tokens).view(by_head))
    else:
        got = (dropped @ all_tokens).transpose(0, 1) @ value.weight.view(of_head).mT
        got = got + probs.sum(-1).T[..., None] * value.bias.view(-1, 1, size)  # [H, B, size]
    attended = got.transpose(0, 1).reshape(token.shape[0], 1, -1).to(all_tokens.dtype)
    return (self.out_lin(attended) if hasattr(self, "out_lin") else attended), probs[:, :, None]


def fused_qkv_attention(
    self: Any,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *others: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward pass of the other layers' self-attention module: query, key and value in one product.
    Autocast then casts and saves the tokens once, not once for each of three products. Backward
    computes their gradient in one product, instead of casting back and adding three.

    Args:
        self: the module.
        tokens: [B, S, D].
        attention_mask: bool, True for tokens to attend to; of a shape that broadcasts to
            [B, H, S, S].
        others: only for the class's own forward pass, which runs if there are adapters, or if the
            attention implementation has been changed since.
        kwargs: for the attention.

    Returns:
        What the module returns: output, [B, S, D], and attention weights, if requested.
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

"""Self-attention as BERT computes it; where it is eager on a CPU, in fewer passes.

The models' own, in bfloat16 and with dropout, multiplies, masks, casts and drops the scores one
after the other, and keeps 7 bytes of each for the backward pass. This one scales within the
products and keeps 3. With heads of 32 numbers it errs 0.8 to 0.97 times as much; of 64, whose
scaling is exact, as much in what it gives, and up to 1.1 times in gradients of query and key.

Legend: B samples, H heads, Q tokens that ask, S tokens that are asked, D numbers of a head.
"""

from typing import Any

import torch

from accel_ft.model.dropout import LEVELS, draw_kept

PROJECTIONS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))  # DistilBERT's
FEWEST_VECTORISED = 32  # keys, below which torch's softmax of 16-bit floats takes one by one


def self_attention(
    self: Any,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    all_tokens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward pass of a module of self-attention, of BERT's or DistilBERT's shape.

    Args:
        self: the module.
        tokens: that ask, [B, Q, hidden size].
        attention_mask: added to the scores, or for SDPA also bool, what may be seen; [B, 1, 1, S],
            or with a row for each token.
        all_tokens: that are asked, [B, S, hidden size]; those that ask where it is None.

    Returns:
        What the module returns: [B, Q, hidden size], and the weights or None.
    """
    if tokens.is_cpu and torch.is_autocast_enabled("cpu"):  # once, not for each projection
        kind = torch.get_autocast_dtype("cpu")
        tokens = tokens.to(kind)
        all_tokens = None if all_tokens is None else all_tokens.to(kind)
    all_tokens = tokens if all_tokens is None else all_tokens
    if attention_mask is not None:
        attention_mask = attention_mask[:, :, : tokens.shape[1]]
    names = next(names for names in PROJECTIONS if hasattr(self, names[0]))
    query, key, value = (
        getattr(self, name)(given)
        .view(given.shape[0], given.shape[1], -1, self.attention_head_size)
        .transpose(1, 2)
        for name, given in zip(names, (tokens, all_tokens, all_tokens), strict=True)
    )
    p = self.dropout.p if self.training else 0.0
    is_eager = self.config._attn_implementation == "eager"
    weights_are_asked = kwargs.get("output_attentions") or self.config.output_attentions
    is_ours = is_eager and tokens.is_cpu and not torch.compiler.is_compiling()
    if is_ours and round(p * LEVELS) < LEVELS and not weights_are_asked:
        attended, weights = attend(query, key, value, attention_mask, self.scaling, p), None
        attended = attended.transpose(1, 2)
    else:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.bert.modeling_bert import eager_attention_forward  # or one like it

        path = self.config._attn_implementation
        compute = ALL_ATTENTION_FUNCTIONS.get_interface(path, eager_attention_forward)
        attended, weights = compute(
            self, query, key, value, attention_mask, dropout=p, scaling=self.scaling, **kwargs
        )
    attended = attended.reshape(*tokens.shape[:-1], -1)
    return (self.out_lin(attended) if hasattr(self, "out_lin") else attended), weights


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    p: float,
) -> torch.Tensor:
    """Return softmax(query x key^T x scaling + mask) x value, [B, H, Q, D].

    Args:
        query: [B, H, Q, D], of the same type as key and value.
        key, value: [B, H, S, D].
        mask: added to the scores, of a shape that broadcasts to [B, H, Q, S].
        scaling: of the scores.
        p: probability of dropout of what softmax gives.
    """
    if mask is not None:
        least = max(torch.finfo(kind).min for kind in (query.dtype, mask.dtype))
        mask = mask.clamp(min=least)  # float32's would be -inf in bfloat16
    dropped = round(p * LEVELS)
    attended: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, scaling, dropped
    )
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        dropped: int,
    ) -> torch.Tensor:
        shape = (*query.shape[:3], key.shape[2])
        query, key, value = (each.reshape(-1, *each.shape[2:]) for each in (query, key, value))
        scores = query.new_zeros(()).expand(shape) if mask is None else mask
        scores = torch.empty(shape, dtype=query.dtype).copy_(scores).flatten(0, 1)
        scores.baddbmm_(query, key.mT, alpha=scaling)
        wide = torch.promote_types(query.dtype, torch.float32)
        shares = scores.softmax(-1, dtype=wide).to(query.dtype)
        kept = draw_kept(shares.shape, dropped) if dropped else None
        ctx.save_for_backward(query, key, value, shares, kept)
        ctx.scaling, ctx.scale = scaling, LEVELS / (LEVELS - dropped)
        left = shares if kept is None else torch.mul(shares, kept, out=scores)
        return _product(left, value, ctx.scale).view(*shape[:3], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, shares, kept = ctx.saved_tensors
        attended = gradients[0].reshape(query.shape)
        of_shares = _product(attended, value.mT, ctx.scale)
        if kept is not None:
            of_shares.mul_(kept)
        is_vectorised = shares.shape[-1] >= FEWEST_VECTORISED
        kind = query.dtype if is_vectorised else torch.promote_types(query.dtype, torch.float32)
        of_scores = torch._softmax_backward_data(of_shares.to(kind), shares.to(kind), -1, kind)
        of_scores = of_scores.to(query.dtype)
        left = shares if kept is None else torch.mul(shares, kept, out=of_shares)
        found = (
            _product(of_scores, key, ctx.scaling),
            _product(of_scores.mT, query, ctx.scaling),
            _product(left.mT, attended, ctx.scale),
        )
        heads = gradients[0].shape[:2]
        return *(each.view(*heads, *each.shape[1:]) for each in found), None, None, None


def _product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a x b x scale, [B x H, ...], rounded once."""
    product = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    return product.baddbmm_(a, b, beta=0, alpha=scale)  # not in place it copies first

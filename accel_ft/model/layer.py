"""A BERT encoder layer as one autograd function, forward and backward, for a CPU.

Training on a CPU is bound by memory as much as by matrix products. Autograd splits a layer into
some forty passes, each over tensors that have left the cache. Here the layer is one function: it
saves less, fuses scaling, dropout and addition into other passes, and writes gradients over
buffers that are no longer needed. It computes the same products, and the same output and gradients
up to rounding. Under autocast, residuals and norms stay in float32, as they do in torch's layers.

Legend: B samples, H heads, S tokens, D hidden size, N = B x S or, packed, fewer; probs are the
    attention probabilities; d_x is the gradient of x.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from accel_ft.model.dropout import MOST, apply_mask, draw_mask, seeded
from accel_ft.model.packing import Packing, pack, packing, unpack

VECTOR = 32  # 16-bit floats; torch's softmax takes the remainder of a row's keys one by one
FEWEST_TURNED = 256  # columns of a matrix from which `_turned` pays off
HAS_AMX = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_bf16")


class Settings(NamedTuple):
    """The arguments of a layer's forward pass that are not tensors."""

    kind: torch.dtype  # of the matrix products
    size: int  # of a head
    scaling: float  # of the scores
    eps: tuple[float, ...]  # of the two norms
    dropouts: list[float]  # of probs, attention output and feed-forward output
    packed: Packing | None  # of tokens [N, D]; None: they are [B, S, D]


def attention_of(layer: Any) -> Any:
    """Return a layer's self-attention module."""
    return getattr(layer.attention, "self", layer.attention)


def projections(attention: Any) -> list[Any]:
    """Return the modules that make query, key and value."""
    if hasattr(attention, "query"):
        return [attention.query, attention.key, attention.value]
    return [attention.q_lin, attention.k_lin, attention.v_lin]  # DistilBERT's


def layer_parts(layer: Any) -> tuple[list[Any], Any, list[float]]:
    """Return a layer's modules with parameters (query, key, value, out, wide, narrow, and the two
    norms), its activation, and its dropout probabilities: of probs, attention output and
    feed-forward output.
    """
    attention = attention_of(layer)
    if hasattr(layer, "ffn"):  # DistilBERT's
        ffn = layer.ffn
        others = [attention.out_lin, ffn.lin1, ffn.lin2]
        norms = [layer.sa_layer_norm, layer.output_layer_norm]
        activation, dropouts = ffn.activation, [0.0, ffn.dropout.p]
    else:
        given, last = layer.attention.output, layer.output
        others = [given.dense, layer.intermediate.dense, last.dense]
        norms = [given.LayerNorm, last.LayerNorm]
        activation = layer.intermediate.intermediate_act_fn
        dropouts = [given.dropout.p, last.dropout.p]
    modules = [*projections(attention), *others, *norms]
    return modules, activation, [attention.dropout.p, *dropouts]


def use_fused_layer(layer: Any, packs: bool = False) -> None:
    """Replace a layer's forward pass by `forward`. Call before anything wraps the model.

    Args:
        layer: of BERT's or DistilBERT's shape.
        packs: whether the layer may drop padding, because later layers and the head read none of
            it, except a text's first token. It then returns [N, D], for another layer that packs,
            or for `unpacked`.
    """
    layer.forward = partial(forward, layer, packs)  # a method would not unpickle


def packing_of(layer: Any, attention_mask: torch.Tensor | None) -> Packing | None:
    """Return a batch's packing, for a layer that packs; None if `packing` does not pack it."""
    has_version = attention_mask is not None and not attention_mask.is_inference()
    version = attention_mask._version if has_version else 0  # type: ignore[union-attr]
    return packing(attention_mask, attention_of(layer).config.num_attention_heads, version)


def unpacked(layer: Any, tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """[N, D] from a layer that packs, or [B, S, D] -> [B, S, D]."""
    if tokens.ndim == 3:
        return tokens
    packed = packing_of(layer, attention_mask)
    assert packed is not None  # the layer that packed them got the same mask
    return unpack(tokens, packed)


def forward(
    layer: Any,
    packs: bool,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *others: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward pass of a layer, fused if possible. Otherwise the class's own one runs, for example
    on a GPU, if compiled, with adapters, without GELU, or if attention weights are requested.

    Args:
        layer, packs: see `use_fused_layer`.
        tokens: [B, S, D]; [N, D] from another layer that packs.
        attention_mask: added to the scores, of a shape that broadcasts to [B, H, S, S].
        others: only for the class's own forward pass, as `kwargs` are.

    Returns:
        [B, S, D], or [N, D].
    """
    attention, checkpoints = attention_of(layer), getattr(layer, "gradient_checkpointing", False)
    modules, activation, dropouts = layer_parts(layer)
    dropouts = [p * layer.training for p in dropouts]
    if (
        torch.compiler.is_compiling()
        or not tokens.is_cpu
        or set(map(type, modules)) != {nn.Linear, nn.LayerNorm}
        or getattr(activation, "act", None) is not F.gelu
        or max(dropouts) > MOST
        or kwargs.get("output_attentions")
        or attention.config.output_attentions
        or attention.config._attn_implementation != "eager"  # changed since
        or any(isinstance(module.weight, DTensor) for module in modules)  # a part is an FSDP2 unit
    ):
        tokens = unpacked(layer, tokens, attention_mask)
        return type(layer).forward(layer, tokens, attention_mask, *others, **kwargs)  # type: ignore[no-any-return]
    packed = packing_of(layer, attention_mask) if packs else None
    if packed and tokens.ndim == 3:
        packed = packed if packed.batch == tokens.shape[:2] else None  # one mask row for all texts
        tokens = pack(tokens, packed) if packed else tokens
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tokens.dtype
    if attention_mask is not None:
        least = max(torch.finfo(each).min for each in (kind, attention_mask.dtype))
        attention_mask = attention_mask.clamp(min=least)  # float32's min is -inf in bfloat16
    eps = (modules[6].eps, modules[7].eps)
    settings = Settings(
        kind, attention.attention_head_size, attention.scaling, eps, dropouts, packed
    )
    tensors = [tensor for module in modules for tensor in (module.weight, module.bias)]
    given = (tokens, attention_mask, settings, *tensors)
    if checkpoints and layer.training and torch.is_grad_enabled():
        again: torch.Tensor = layer._gradient_checkpointing_func(_Layer.apply, *given)
        return again
    result: torch.Tensor = _Layer.apply(*given)  # type: ignore[no-untyped-call]
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, mask: torch.Tensor | None, to: Settings, *tensors: Any
    ) -> torch.Tensor:
        kind = to.kind
        shape = torch.Size((*to.packed.batch, tokens.shape[-1])) if to.packed else tokens.shape
        weights, biases = tensors[::2], tensors[1::2]
        cast = [each.to(kind) for each in weights[:6]]
        w_q, w_k, w_v, w_out, w_wide, w_narrow = cast
        b_q, b_k, b_v, b_out, b_wide, b_narrow = (b.to(kind) for b in biases[:6])
        residual = tokens.reshape(-1, tokens.shape[-1])  # [N, D]
        x = residual.to(kind)

        query, key, value = (
            _by_head(torch.addmm(bias, x, weight.T), shape, to)
            for weight, bias in ((w_q, b_q), (w_k, b_k), (w_v, b_v))
        )  # [B x H, S, size]
        full = (shape[0], len(query) // shape[0], shape[1], shape[1])
        scores = query.new_empty(full)
        scores.zero_() if mask is None else scores.copy_(mask)
        scores = scores.flatten(0, 1).baddbmm_(query, key.mT, alpha=to.scaling)
        is_whole = shape[1] % VECTOR == 0  # either way computed in float32, and rounded once
        wide_kind = kind if is_whole else torch.promote_types(kind, torch.float32)
        probs = scores.softmax(-1, dtype=wide_kind).to(kind)
        generator = seeded() if any(to.dropouts) else None
        kept_probs, scale_probs = draw_mask(probs.shape, to.dropouts[0], generator)
        dropped = apply_mask(probs, kept_probs, scores)
        attended = _together(_product(dropped, value, scale_probs), shape, to)  # [N, D]
        del scores, dropped

        given = torch.addmm(b_out, attended, w_out.T)
        middle, norm, scale_given = _add_norm(
            residual, given, to.dropouts[1], generator, weights[6], biases[6], to.eps[0]
        )
        y = middle.to(kind)
        before = torch.addmm(b_wide, y, w_wide.T)
        after = F.gelu(before)
        given = torch.addmm(b_narrow, after, w_narrow.T)
        result, last, scale_narrow = _add_norm(
            middle, given, to.dropouts[2], generator, weights[7], biases[7], to.eps[1]
        )
        ctx.settings, ctx.shape, ctx.scales = to, shape, (scale_probs, scale_given, scale_narrow)
        ctx.save_for_backward(
            x, query, key, value, probs, kept_probs, attended, y, before, after,
            *cast, *norm, *last,
        )  # fmt: skip
        whole: torch.Tensor = torch.ops.aten._unsafe_view(result, tokens.shape)
        return whole  # not a view, of which FSDP2 warns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        to, shape, kind = ctx.settings, ctx.shape, ctx.settings.kind
        scale_probs, scale_given, scale_narrow = ctx.scales
        saved = ctx.saved_tensors  # read once: gradient checkpointing recomputes them
        x, query, key, value, probs, kept_probs, attended, y, before, after = saved[:10]
        w_q, w_k, w_v, w_out, w_wide, w_narrow = saved[10:16]
        norm, last = saved[16:22], saved[22:]

        d, d_given, *of_last = _add_norm_backward(gradients[0].reshape(-1, shape[-1]), kind, *last)
        of_narrow = _linear_backward(d_given, after, d, scale_narrow)
        d_wide = _product(d_given, w_narrow, scale_narrow)
        torch.ops.aten.gelu_backward.grad_input(d_wide, before, grad_input=d_wide)
        of_wide = _linear_backward(d_wide, y, d)
        d, d_given, *of_norm = _add_norm_backward(d.add_(d_wide @ w_wide), kind, *norm)
        of_out = _linear_backward(d_given, attended, d, scale_given)

        d_attended = _by_head(_product(d_given, w_out, scale_given), shape, to)
        d_probs = _product(d_attended, value.mT, scale_probs)
        apply_mask(d_probs, kept_probs, d_probs)
        wide_kind = kind if shape[1] >= VECTOR else torch.promote_types(kind, torch.float32)
        d_scores = torch._softmax_backward_data(
            d_probs.to(wide_kind), probs.to(wide_kind), -1, wide_kind
        ).to(kind)
        dropped = apply_mask(probs, kept_probs, d_probs)
        d_query = _together(_product(d_scores, key, to.scaling), shape, to)
        d_key = _together(_product(d_scores.mT, query, to.scaling), shape, to)
        d_value = _together(_product(dropped.mT, d_attended, scale_probs), shape, to)
        of_projections: list[torch.Tensor] = []
        for gradient in (d_query, d_key, d_value):
            of_projections += _linear_backward(gradient, x, d)
        d.add_((d_query @ w_q).addmm_(d_key, w_k).addmm_(d_value, w_v))
        return (
            d.view(gradients[0].shape), None, None,
            *of_projections, *of_out, *of_wide, *of_narrow, *of_norm, *of_last,
        )  # fmt: skip


def _by_head(rows: torch.Tensor, shape: torch.Size, to: Settings) -> torch.Tensor:
    """[N, D] -> [B x H, S, size]."""
    if to.packed:
        heads = rows.view(-1, to.size).index_select(0, to.packed.of_heads)
    else:
        heads = rows.view(shape[0], shape[1], -1, to.size).transpose(1, 2)
    return heads.reshape(-1, shape[1], to.size)


def _together(heads: torch.Tensor, shape: torch.Size, to: Settings) -> torch.Tensor:
    """[B x H, S, size] -> [N, D]."""
    if to.packed:
        return heads.view(-1, to.size).index_select(0, to.packed.of_rows).view(-1, shape[2])
    rows = heads.view(shape[0], -1, *heads.shape[1:]).transpose(1, 2)
    return rows.reshape(shape[0] * shape[1], -1)


def _product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a @ b x scale, of matrices or of batches [B x H] of matrices, rounded once."""
    product = a.new_empty((*a.shape[:-1], b.shape[-1]))  # out of place, torch would copy it
    add = product.addmm_ if a.ndim == 2 else product.baddbmm_
    return add(a, b, beta=0, alpha=scale)


def _add_norm(
    residual: torch.Tensor,
    given: torch.Tensor,
    p: float,
    generator: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...], float]:
    """Return the norm of residual + dropout(given), [N, D], the tensors that its backward pass
    needs, and dropout's factor.
    """
    kept, factor = draw_mask(given.shape, p, generator)
    given = apply_mask(given, kept, given)
    given = given.to(residual.dtype)  # `add` would convert too, but not reuse the memory
    total = torch.add(residual, given, alpha=factor, out=given)
    normed, mean, scale = torch.native_layer_norm(total, total.shape[1:], weight, bias, eps)
    return normed, (total, mean, scale, kept, weight, bias), factor


def _add_norm_backward(
    gradient: torch.Tensor,
    kind: torch.dtype,
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    kept: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of residual, given (without dropout's factor), weight and bias."""
    d_total, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        gradient, total, total.shape[1:], mean, scale, weight, bias, [True, True, True]
    )
    d_given = d_total.to(kind, copy=True)
    apply_mask(d_given, kept, d_given)
    return d_total, d_given, d_weight, d_bias


def _linear_backward(
    gradient: torch.Tensor, given: torch.Tensor, like: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a linear layer's weight and bias, in the dtype of `like`. The
    gradient of its output is gradient x scale; its input is `given`.
    """
    of_bias = gradient.sum(0).to(like.dtype)  # first, while the gradient is in the cache
    turned = _turned(gradient) if given.shape[1] > gradient.shape[1] else gradient.T
    return _product(turned, given, scale).to(like.dtype), of_bias.mul_(scale)


def _turned(rows: torch.Tensor) -> torch.Tensor:
    """[N, D] -> [D, N], for a product with a wider matrix. With AMX the result is contiguous, as a
    product with a view takes up to twice as long; multiplying by the identity beats torch's copy.
    """
    if HAS_AMX and rows.dtype == torch.bfloat16 and rows.shape[1] >= FEWEST_TURNED:
        return torch.eye(rows.shape[1], dtype=rows.dtype) @ rows.T
    return rows.T

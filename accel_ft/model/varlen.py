"""Texts end to end, without padding, for a GPU: [1, N] in place of [B, S].

All of an encoder but its attention looks at one token at a time, and needs no rectangle. Attention
gets told where each text begins, and the kernel that torch's nested tensors use does the rest; on
a CPU, for tests, it makes a rectangle. A few texts of padding at the end bring N to one of few
values, so that shapes come again.

Legend: B texts, K texts of padding, S tokens at most of a text, H heads, D hidden size, N tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention


def places(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's text and its place in it, int64 [N].

    Args:
        starts: of the texts, and the end, int32 [B + K + 1]: 0 to N, ascending.
        num_tokens: N.
    """
    token = torch.arange(num_tokens, device=starts.device)
    text = torch.searchsorted(starts, token, right=True) - 1
    return text, token - starts[text]


def rectangle(tokens: torch.Tensor, starts: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[1, N, D] -> [B, S, D], the first B texts; beyond its end a text has tokens of others.

    Args:
        tokens: end to end.
        starts: see `places`.
        size: B, S.
    """
    row = starts[: size[0], None] + torch.arange(size[1], device=starts.device)
    return F.embedding(row.clamp(max=tokens.shape[1] - 1), tokens[0])


def is_supported(config: Any, device: torch.device, kind: torch.dtype) -> bool:
    """Return whether a device has the kernel for heads of a model's size, and the kind of number
    that they compute in.
    """
    heads = config.num_attention_heads
    one = torch.empty(1, heads, 8, config.hidden_size // heads, dtype=kind, device=device)
    return can_use_efficient_attention(SDPAParams(one, one, one, None, 0.1, False, False))


def attend(
    made: torch.Tensor, starts: torch.Tensor, longest: int, dropout: float, scaling: float
) -> torch.Tensor:
    """Let each token attend to those of its text.

    Args:
        made: query, key and value, [1, N, 3, H, D / H].
        starts: see `places`.
        longest: S.
        dropout: probability.
        scaling: of the scores.

    Returns:
        [1, N, D].
    """
    query, key, value = made.unbind(2)
    if (
        made.is_cuda
    ):  # torch's flash attention, of other tiles, took twice as long on texts as short
        given: torch.Tensor = torch.ops.aten._efficient_attention_forward(
            query, key, value, None, starts, starts, longest, longest, dropout, 0, True,
            scale=scaling,
        )[0]  # fmt: skip
    else:
        text, place = places(starts, made.shape[1])
        num_texts = starts.shape[0] - 1
        by_text = rectangle(made.flatten(2), starts, (num_texts, longest))
        by_text = by_text.view(num_texts, longest, *made.shape[2:])
        query, key, value = (each.transpose(1, 2) for each in by_text.unbind(2))
        is_seen = torch.arange(longest, device=starts.device) < starts.diff().clamp(min=1)[:, None]
        given = F.scaled_dot_product_attention(
            query, key, value, is_seen[:, None, None], dropout, scale=scaling
        )
        given = given.transpose(1, 2)[text, place]
    return given.reshape(1, made.shape[1], -1)

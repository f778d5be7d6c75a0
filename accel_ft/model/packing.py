"""Packs a batch's tokens without padding, for all layers of an encoder but the last.

A batch [B, S] of texts of unequal length holds padding that nothing reads. Except for attention, a
layer works on one token at a time and can skip it: it gets [N, D], the tokens of the texts and a
few more. For each new N the CPU library creates and caches kernels of matrix products (5 MiB for
MiniLM), so N takes few values.

Legend: B samples, H heads, S tokens, D hidden size, N rows.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

SIZES = 16  # values of N, from any number of rows to its double


class Packing(NamedTuple):
    """Indices between tokens [B x S] and packed rows [N], int64."""

    batch: torch.Size  # B, S
    kept: torch.Tensor  # [N], the token of each row
    row: torch.Tensor  # [B x S], the row of each token; of a dropped one, a row of padding
    of_heads: torch.Tensor  # [B x H x S], like `row`, into [N x H]
    of_rows: torch.Tensor  # [N x H], like `kept`, into [B x H x S]


@lru_cache(maxsize=1)  # all layers ask in turn, with the same mask
def packing(mask: torch.Tensor | None, heads: int, version: int = 0) -> Packing | None:
    """Return which tokens to keep: all that are not padding, the first token of each text, and at
    least one token of padding. None if that saves nothing.

    Args:
        mask: added to the scores, [B, 1, 1, S]; for another shape, None is returned.
        heads: H.
        version: of the mask, part of the cache key, as the mask may be changed in place.
    """
    if mask is None or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    is_seen = mask[:, 0, 0] > torch.finfo(mask.dtype).min
    if not is_seen.any(dim=1).all():  # a fully masked text attends to padding
        return None
    is_seen[:, 0] = True
    (size, length), count = is_seen.shape, int(is_seen.sum()) + 1
    count += -count % max(2 ** (count.bit_length() - 1) // SIZES, 1)
    if count >= is_seen.numel():
        return None
    kept = (~is_seen).flatten().to(torch.uint8).argsort(stable=True)[:count]
    row = torch.full((is_seen.numel(),), count - 1)
    row[kept] = torch.arange(count)
    head = torch.arange(heads)
    of_heads = row.view(size, 1, length) * heads + head[:, None]
    of_rows = (kept // length * heads)[:, None] + head
    of_rows = of_rows * length + (kept % length)[:, None]
    return Packing(is_seen.shape, kept, row, of_heads.flatten(), of_rows.flatten())


def pack(tokens: torch.Tensor, to: Packing) -> torch.Tensor:
    """[B, S, D] -> [N, D]."""
    rows: torch.Tensor = _Rows.apply(tokens.flatten(0, 1), to.kept, to.row)  # type: ignore[no-untyped-call]
    return rows


def unpack(rows: torch.Tensor, to: Packing) -> torch.Tensor:
    """[N, D] -> [B, S, D]; dropped tokens get the values of a kept token of padding."""
    tokens: torch.Tensor = _Rows.apply(rows, to.row, to.kept)  # type: ignore[no-untyped-call]
    return tokens.view(*to.batch, -1)


class _Rows(torch.autograd.Function):
    """Selects rows by index. Backward selects too, and need not add: padding's gradient is 0."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> Any:
        ctx.back = back
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, ctx.back), None, None

"""Tokens without their padding, for the layers that stand between the first and the last.

A batch [B, S] of texts of unequal length holds tokens that nobody reads. All of a layer but its
attention looks at one token at a time, and can do without them: it gets [N, D], the tokens that are
some text's, and a few more. For each new N the CPU library makes, and keeps, kernels of matrix
products (5 MiB of MiniLM's), so that few are to occur.

Legend: B samples, H heads, S tokens, D hidden size, N rows.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

SIZES = 16  # of N, from any number of rows to its double


class Packing(NamedTuple):
    """Which row is which token, int64."""

    batch: torch.Size  # B, S
    kept: torch.Tensor  # [N], of B x S: the token of each row
    row: torch.Tensor  # [B x S], the row of each token; of what is left out, a row of padding
    of_heads: torch.Tensor  # [B x H x S], the same of rows [N x H]
    of_rows: torch.Tensor  # [N x H], the same as `kept` of heads [B x H x S]


@lru_cache(maxsize=1)  # a batch's layers ask one after the other, with the same mask
def packing(mask: torch.Tensor | None, heads: int, version: int = 0) -> Packing | None:
    """Return which tokens to keep: all but padding, which no token sees, and of padding the first
    token of each text and at least one more. None where that saves nothing.

    Args:
        mask: added to the scores, [B, 1, 1, S]; else None is returned.
        heads: H.
        version: of the mask, which may be changed in place.
    """
    if mask is None or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    is_seen = mask[:, 0, 0] > torch.finfo(mask.dtype).min
    if not is_seen.any(dim=1).all():  # who sees nothing sees all of it
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
    """[N, D] -> [B, S, D]; tokens that were left out are as one that was not."""
    tokens: torch.Tensor = _Rows.apply(rows, to.row, to.kept)  # type: ignore[no-untyped-call]
    return tokens.view(*to.batch, -1)


class _Rows(torch.autograd.Function):
    """Rows by their places; a gradient goes back by places, too, for that of padding is 0."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> Any:
        ctx.back = back
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, ctx.back), None, None

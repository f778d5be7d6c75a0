"""Attention on a CPU in fewer passes is the attention it stands for."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import eager_attention_forward

from accel_ft.model import attention
from accel_ft.model.attention import attend

LEAST = torch.finfo(torch.float32).min


def inputs(
    asking: int, asked: int, dtype: torch.dtype = torch.float64, head_size: int = 4
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of 2 samples and 3 heads, laid out as a model's projections are."""
    generator = torch.Generator().manual_seed(0)
    made = (
        torch.randn(2, count, 3, head_size, generator=generator, dtype=torch.float64).to(dtype)
        for count in (asking, asked, asked)
    )
    return tuple(each.transpose(1, 2).requires_grad_() for each in made)


def mask_of(kind: str, asking: int, asked: int) -> torch.Tensor | None:
    """Nothing, one row for all, or a row for each token; the first sample is a token shorter."""
    seen = torch.zeros(2, 1, 1 if kind == "row" else asking, asked)
    seen[0, :, :, -1] = LEAST
    return None if kind == "none" else seen


def results(attended: torch.Tensor, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What came out, and the gradients of a sum whose terms all differ."""
    weights = torch.linspace(-1, 1, attended.numel(), dtype=torch.float64).view(attended.shape)
    gradients = torch.autograd.grad((attended * weights.to(attended.dtype)).sum(), given)
    return [attended.detach(), *gradients]


def eager(
    given: tuple[torch.Tensor, ...], mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    module = nn.Module().train()
    return eager_attention_forward(module, *given, mask, **kwargs)[0].transpose(1, 2)


@pytest.mark.parametrize("kind", ["none", "row", "rows"])
@pytest.mark.parametrize("shape", [(1, 7), (7, 7), (1, 40), (40, 40)], ids=str)
def test_output_and_gradients_are_those_of_the_model(shape: tuple[int, int], kind: str) -> None:
    given, mask = inputs(*shape), mask_of(kind, *shape)
    ours = results(attend(*given, mask, 0.3, 0.0), given)
    theirs = results(eager(given, mask, scaling=0.3, dropout=0.0), given)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("head_size", "most"), [(32, 1.0), (64, 1.1)])
@pytest.mark.parametrize("length", [24, 64])
def test_it_errs_about_as_much_in_bfloat16(length: int, head_size: int, most: float) -> None:
    """As what the model computes under autocast; heads of 32 cannot be scaled without rounding."""
    mask, scaling = mask_of("row", length, length), head_size**-0.5
    exact = inputs(length, length, head_size=head_size)
    rough = tuple(each.detach().bfloat16().requires_grad_() for each in exact)
    exact = tuple(each.detach().double().requires_grad_() for each in rough)
    truth = results(attend(*exact, mask, scaling, 0.0), exact)
    ours = results(attend(*rough, mask, scaling, 0.0), rough)
    with torch.autocast("cpu", torch.bfloat16):
        attended = eager(rough, mask, scaling=scaling, dropout=0.0)
    for mine, other, true in zip(ours, results(attended, rough), truth, strict=True):
        error, usual = ((each.double() - true).norm() for each in (mine, other))
        assert 0 < error <= most * usual


@pytest.mark.parametrize("length", [7, 40])
def test_dropout_of_the_shares(length: int) -> None:
    """The same mask forwards and backwards, scaled; drawn anew each time."""
    given, drawn = inputs(length, length), []

    def draw(*args: Any) -> torch.Tensor:
        drawn.append(draw_kept(*args))
        return drawn[-1]

    draw_kept = attention.draw_kept
    with mock.patch.object(attention, "draw_kept", draw):
        ours = results(attend(*given, None, 0.3, 0.25), given)
        attend(*given, None, 0.3, 0.25)
    assert not torch.equal(*drawn)
    shares = (given[0] @ given[1].mT * 0.3).softmax(-1)
    left = shares * drawn[0].view(shares.shape) / 0.75
    for mine, other in zip(ours, results(left @ given[2], given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_three_bytes_of_a_score_are_kept() -> None:
    given, kept = inputs(40, 40, torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attend(*given, mask_of("row", 40, 40), 0.3, 0.1)
    scores = 2 * 3 * 40 * 40
    assert sum(each.nbytes for each in kept if each.numel() == scores) == 3 * scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_without_a_token(dtype: torch.dtype) -> None:
    """The least float32 would be minus infinity in bfloat16, and softmax of nothing else not a number."""
    given = inputs(7, 7, dtype)
    mask = torch.full((2, 1, 1, 7), LEAST)
    attended = attend(*given, mask, 0.3, 0.0)
    torch.testing.assert_close(attended[:, :, 0], given[2].mean(2), rtol=0.02, atol=0.01)


def test_a_second_derivative_is_refused() -> None:
    query, *_ = given = inputs(7, 7)
    (first,) = torch.autograd.grad(
        attend(*given, None, 0.3, 0.0).square().sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()

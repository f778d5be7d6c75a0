"""The fused layer computes what transformers' layer computes."""

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel

from accel_ft.model import layer as module
from accel_ft.model.first_token import KINDS
from accel_ft.model.layer import use_fused_layer

LEAST = torch.finfo(torch.float32).min
SIZES = {"vocab_size": 9, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 40,
         "num_attention_heads": 3, "embedding_size": 24}  # fmt: skip
OF_DISTILBERT = {"dim": 24, "hidden_dim": 40, "n_layers": 1, "n_heads": 3}
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")


def layers(kind: str = "bert", p: float = 0.0, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    """Return a fused layer, and one with its class's forward pass; all of their parameters are random."""
    torch.manual_seed(seed)
    sizes = {
        **SIZES,
        **(OF_DISTILBERT if kind == "distilbert" else {}),
        **dict.fromkeys(DROPOUT, p),
    }
    config = AutoConfig.for_model(kind, **(sizes | settings))
    model = AutoModel.from_config(config, attn_implementation="eager")
    (theirs,) = (model.transformer if kind == "distilbert" else model.encoder).layer
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    norms = [module for module in theirs.modules() if isinstance(module, torch.nn.LayerNorm)]
    norms[0].eps = 1e-3  # the norms' eps may differ
    ours = copy.deepcopy(theirs).train()
    use_fused_layer(ours)
    return copy.deepcopy(ours), theirs.train()  # a copy must not share modules


def given(length: int, kind: str = "row") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens of two samples, the first a token shorter, and a mask with one row per sample, or per token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(2, length, 24, generator=generator, requires_grad=True)
    mask = torch.zeros(2, 1, length if kind == "rows" else 1, length)
    mask[0, :, :, -1] = LEAST
    return tokens, None if kind == "none" else mask


def results(layer: Any, tokens: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of its weighted sum, with a different weight for each value."""
    tokens = tokens.detach().requires_grad_()
    out = layer(tokens, mask)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad((out * weights).sum(), (tokens, *parameters))
    return dict(zip(("out", "tokens", *names), (out.detach(), *gradients), strict=True))


@pytest.mark.parametrize("kind", ["none", "row", "rows"])
@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_output_and_gradients_are_those_of_the_model(model: str, length: int, kind: str) -> None:
    ours, theirs = (each.double() for each in layers(model))
    tokens, mask = given(max(length, 2 - (kind == "none")), kind)
    with mock.patch.object(type(ours), "forward", side_effect=AssertionError):
        mine = results(ours, tokens.double(), mask)
    for name, other in results(theirs, tokens.double(), mask).items():
        torch.testing.assert_close(mine[name], other, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("model", ["bert", "distilbert"])
@pytest.mark.parametrize("length", [24, 64])
def test_it_errs_no_more_in_bfloat16(model: str, length: int) -> None:
    """Errors of output and gradients, over ten seeds, are at most those of transformers under autocast."""
    errors, (tokens, mask) = torch.zeros(2), given(length)
    for seed in range(10):
        ours, theirs = layers(model, seed=seed)
        exact = results(copy.deepcopy(theirs).double(), tokens.double(), mask)
        with torch.autocast("cpu", torch.bfloat16):
            found = [results(layer, tokens, mask) for layer in (ours, theirs)]
        truth, *rough = (
            torch.cat([t.flatten() for t in each.values()]) for each in (exact, *found)
        )
        assert {each.dtype for each in rough} == {torch.float32}
        errors += torch.stack([(each - truth).norm() / truth.norm() for each in rough])
    assert 0 < errors[0] <= errors[1]


@pytest.mark.parametrize(("dtype", "amx", "width", "turns"), [
    (torch.bfloat16, True, 300, True), (torch.bfloat16, True, 200, False),
    (torch.bfloat16, False, 300, False), (torch.float32, True, 300, False),
])  # fmt: skip
def test_rows_are_turned_for_the_products_of_amx(
    dtype: torch.dtype, amx: bool, width: int, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns the transpose, contiguous only where that makes AMX's products faster."""
    monkeypatch.setattr(module, "HAS_AMX", amx)
    rows = torch.randn(7, width).to(dtype)
    turned = module._turned(rows)
    assert torch.equal(turned, rows.T)
    assert turned.is_contiguous() == turns


@pytest.mark.parametrize("model", ["bert", "distilbert"])
@pytest.mark.parametrize("length", [7, 40])
def test_dropout(model: str, length: int) -> None:
    """Forward and backward pass use the same scaled masks; each forward pass draws new ones."""
    ours, theirs = (each.double() for each in layers(model, 0.25))
    (tokens, mask), drawn = given(length), []

    def draw(*args: Any) -> tuple[torch.Tensor | None, float]:
        kept, scale = draw_mask(*args)
        drawn.extend([] if kept is None else [kept])
        return kept, scale

    def drop(values: torch.Tensor, p: float, *_: Any, **__: Any) -> torch.Tensor:
        return values * masks.pop(0).view(values.shape) / (1 - p)

    draw_mask = module.draw_mask
    with mock.patch.object(module, "draw_mask", draw):
        mine = results(ours, tokens.double(), mask)
        masks = drawn.copy()
        ours(tokens.double(), mask)
    assert not any(map(torch.equal, masks, drawn[len(masks) :]))
    with mock.patch.object(F, "dropout", drop):
        for name, other in results(theirs, tokens.double(), mask).items():
            torch.testing.assert_close(mine[name], other, rtol=1e-9, atol=1e-11, msg=name)
    assert masks == []
    ours.eval()
    assert torch.equal(ours(tokens.double(), mask), ours(tokens.double(), mask))


def test_bytes_saved_for_the_backward_pass() -> None:
    """Under autocast, with dropout: 3 bytes per score, 2 x 2 per value between the feed-forward products."""
    (ours, _), (tokens, mask), kept = layers(p=0.1), given(40), []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        ours(tokens, mask)
    for count, each in ((2 * 3 * 40 * 40, 3), (2 * 40 * 40, 4)):
        assert sum(t.nbytes for t in kept if t.numel() == count) == each * count


@pytest.mark.parametrize("length", [7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_without_a_token(dtype: torch.dtype, length: int) -> None:
    """The mask's float32 minimum would be minus infinity in bfloat16, and a softmax of nothing else NaN."""
    ours, _ = layers()
    tokens, _ = given(length)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        blind = ours(tokens, torch.full((2, 1, 1, length), LEAST))
    assert blind.isfinite().all()


def test_gradient_checkpointing_keeps_no_more_than_it_would() -> None:
    """transformers checkpoints in the class's forward pass, which the fused one replaces."""
    kept = []
    for layer in layers():
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept[-1].append(t) or t, lambda t: t
        ):
            kept.append([])
            results(layer, *given(40))
    ours, theirs = ([t for t in each if not isinstance(t, torch.nn.Parameter)] for each in kept)
    assert len(ours) == len(theirs)


def test_a_second_derivative_is_refused() -> None:
    ours, _ = layers()
    tokens, mask = given(7)
    (first,) = torch.autograd.grad(ours(tokens, mask).square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_python"},
        {"output_attentions": True},
        {"attention_probs_dropout_prob": 1.0},
    ],
    ids=str,
)
def test_what_it_cannot_do_is_left_to_the_class(settings: dict[str, Any]) -> None:
    ours, theirs = layers(**settings)
    tokens, mask = given(7)
    assert torch.equal(ours(tokens, mask), theirs(tokens, mask))
    with mock.patch.object(module, "_Layer", None):
        ours(tokens, mask)

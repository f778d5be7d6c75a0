"""What is not computed of padding is missed by nobody."""

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from test_first_token import DROPOUT, classifier
from torch.utils.checkpoint import checkpoint

from accel_ft.model import layer as layers
from accel_ft.model import packing as module
from accel_ft.model.first_token import KINDS, leave_out_the_rest
from accel_ft.model.packing import packing

LEAST = torch.finfo(torch.float32).min
LENGTHS = (11, 3, 7, 1, 10)


def batch(left: bool = False) -> dict[str, torch.Tensor]:
    """Five texts of LENGTHS tokens, padded to 11."""
    ids = torch.randint(3, 60, (5, 11), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(11) < torch.tensor(LENGTHS)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def pair(kind: str, p: float = 0.0) -> tuple[Any, Any, list[int]]:
    """A model that leaves out padding, the model as it is, and, filled by the former, how many
    rows each of its layers but the last is given.
    """
    sizes = {"num_hidden_layers": 4, **({"n_layers": 4} if kind == "distilbert" else {})}
    whole = classifier(kind, **sizes, **dict.fromkeys(DROPOUT, p)).double().train()
    ours, rows = copy.deepcopy(whole), []
    leave_out_the_rest(ours)
    apply = layers._Layer.apply

    def count(tokens: torch.Tensor, *others: Any) -> Any:
        rows.append(tokens.shape[:-1].numel())
        return apply(tokens, *others)

    ours.count = mock.patch.object(layers._Layer, "apply", count)
    return ours, whole, rows


def logits_and_gradients(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    logits = model(**given).logits
    torch.nn.functional.cross_entropy(logits, torch.arange(5) % 3).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(ours: Any, whole: Any, given: dict[str, torch.Tensor]) -> None:
    with ours.count:
        mine = logits_and_gradients(ours, given)
    for name, other in logits_and_gradients(whole, given).items():
        torch.testing.assert_close(mine[name], other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_and_gradients_are_the_same(kind: str, multiple: int, left: bool) -> None:
    """Padded on the left, the first token, which the classifier reads, is padding itself."""
    ours, whole, rows = pair(kind)
    with mock.patch.object(module, "MULTIPLE", multiple):
        packing.cache_clear()
        assert_same(ours, whole, batch(left))
    least = sum(LENGTHS) + 1 + left * sum(length < 11 for length in LENGTHS)
    assert rows == [-(-least // multiple) * multiple] * 3


@pytest.fixture
def to_the_row() -> Any:
    packing.cache_clear()
    with mock.patch.object(module, "MULTIPLE", 1):
        yield
    packing.cache_clear()


@pytest.mark.usefixtures("to_the_row")
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_layer_that_is_left_to_its_class(odd: int) -> None:
    """The layers about it leave out padding all the same."""
    ours, whole, rows = pair("bert")
    for model in (ours, whole):
        model.bert.encoder.layer[odd].intermediate.intermediate_act_fn = torch.nn.ReLU()
    assert_same(ours, whole, batch())
    assert rows == [sum(LENGTHS) + 1] * 2


@pytest.mark.usefixtures("to_the_row")
def test_gradient_checkpointing() -> None:
    ours, whole, rows = pair("bert")
    for layer in ours.bert.encoder.layer[:-1]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    assert_same(ours, whole, batch())
    assert rows == [sum(LENGTHS) + 1] * 6


@pytest.mark.usefixtures("to_the_row")
def test_each_batch_has_its_own() -> None:
    ours, whole, _ = pair("bert")
    for left in (False, True, False):
        assert_same(ours, whole, batch(left))
        ours.zero_grad()
        whole.zero_grad()


@pytest.mark.usefixtures("to_the_row")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_draws_for_the_rows_that_are_left(dtype: torch.dtype) -> None:
    """And two passes from one seed are the same."""
    ours, _, _ = pair("bert", 0.2)
    ours, drawn, found = ours.float(), [], []
    real = layers.draw_kept

    def draw(shape: torch.Size, *others: Any) -> torch.Tensor:
        drawn.append(tuple(shape))
        return real(shape, *others)

    with mock.patch.object(layers, "draw_kept", draw):
        for _ in range(2):
            torch.manual_seed(3)
            ours.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                found.append(logits_and_gradients(ours, batch()))
    rows = (sum(LENGTHS) + 1, 32)
    assert drawn == [(20, 11, 11), rows, rows] * 6
    for name, first in found[0].items():
        assert first.isfinite().all()
        assert torch.equal(first, found[1][name]), name


def of_lengths(*lengths: int) -> torch.Tensor:
    """A mask [B, 1, 1, 8] that is added to scores."""
    is_seen = torch.arange(8) < torch.tensor(lengths)[:, None]
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, LEAST)[:, None, None]


def test_where_nothing_is_left_out() -> None:
    assert packing(of_lengths(8, 1, 1, 1, 1, 1, 1, 1), 2) is not None
    assert packing(of_lengths(8, 7, 6, 6), 2) is None  # fewer than a multiple of rows
    assert packing(of_lengths(8, 0, 1, 1, 1, 1, 1, 1), 2) is None  # sees padding as well as nothing
    assert packing(of_lengths(8, *[1] * 7).expand(-1, -1, 8, -1), 2) is None  # a row each
    assert packing(None, 2) is None


def test_a_mask_in_16_bits() -> None:
    """Of float32's least number bfloat16 makes minus infinity."""
    mask = of_lengths(8, 1, 1, 1, 1, 1, 1, 1)
    packed = packing(mask.bfloat16(), 2)
    assert packed is not None
    assert len(packed.kept) == module.MULTIPLE

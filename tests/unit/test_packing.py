"""Leaving out padding changes neither logits nor gradients."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import job_words
from test_first_token import DROPOUT, classifier
from torch.utils.checkpoint import checkpoint

from accel_ft.config import TrainConfig
from accel_ft.data.loader import Padding
from accel_ft.data.splits import load_splits
from accel_ft.engine.fitting import measured_need
from accel_ft.model import layer as layers
from accel_ft.model.first_token import KINDS, compute_first_token_only
from accel_ft.model.load import load_tokenizer
from accel_ft.model.packing import packing
from accel_ft.model.plain import plain_model
from accel_ft.settings import parse

LEAST = torch.finfo(torch.float32).min
LENGTHS = (11, 3, 7, 1, 10)


def batch(left: bool = False) -> dict[str, torch.Tensor]:
    """Five texts of LENGTHS tokens, padded to 11."""
    ids = torch.randint(3, 60, (5, 11), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(11) < torch.tensor(LENGTHS)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def pair(kind: str, p: float = 0.0) -> tuple[Any, Any, list[int]]:
    """Return a model that leaves out padding, the unchanged model, and a list to which the former appends the
    number of rows that each of its layers but the last gets.
    """
    sizes = {"num_hidden_layers": 4, **({"n_layers": 4} if kind == "distilbert" else {})}
    whole = classifier(kind, **sizes, **dict.fromkeys(DROPOUT, p)).double().train()
    ours, rows = copy.deepcopy(whole), []
    compute_first_token_only(ours)
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
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_and_gradients_are_the_same(kind: str, left: bool) -> None:
    """With padding on the left, the first token, which the classifier reads, is padding."""
    ours, whole, rows = pair(kind)
    assert_same(ours, whole, batch(left))
    # The kept tokens and at least one of padding, rounded up to an even number.
    assert rows == [38 if left else 34] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_layer_that_is_left_to_its_class(odd: int) -> None:
    """The layers around it still leave out padding."""
    ours, whole, rows = pair("bert")
    for model in (ours, whole):
        model.bert.encoder.layer[odd].intermediate.intermediate_act_fn = torch.nn.ReLU()
    assert_same(ours, whole, batch())
    assert rows == [34] * 2


def test_gradient_checkpointing() -> None:
    ours, whole, rows = pair("bert")
    for layer in ours.bert.encoder.layer[:-1]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    assert_same(ours, whole, batch())
    assert rows == [34] * 6


def test_each_batch_has_its_own_packing() -> None:
    ours, whole, _ = pair("bert")
    for left in (False, True, False):
        assert_same(ours, whole, batch(left))
        ours.zero_grad()
        whole.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_draws_for_the_rows_that_are_left(dtype: torch.dtype) -> None:
    """Two passes from the same seed agree."""
    ours, _, _ = pair("bert", 0.2)
    ours, drawn, found = ours.float(), [], []
    real = layers.draw_mask

    def draw(shape: torch.Size, *others: Any) -> torch.Tensor:
        drawn.append(tuple(shape))
        return real(shape, *others)

    with mock.patch.object(layers, "draw_mask", draw):
        for _ in range(2):
            torch.manual_seed(3)
            ours.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                found.append(logits_and_gradients(ours, batch()))
    rows = (34, 32)
    assert drawn == [(20, 11, 11), rows, rows] * 6
    for name, first in found[0].items():
        assert first.isfinite().all()
        assert torch.equal(first, found[1][name]), name


def of_lengths(*lengths: int, width: int = 8) -> torch.Tensor:
    """Return a mask that is added to scores, [B, 1, 1, width]."""
    is_seen = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, LEAST)[:, None, None]


def test_where_nothing_is_left_out() -> None:
    assert packing(of_lengths(8, 5, 6, 6), 2) is not None
    assert packing(of_lengths(8, 8, 8, 7), 2) is None  # one row of padding is always kept
    assert packing(of_lengths(8, 0, 1, 1), 2) is None  # a fully masked text attends to padding
    assert packing(of_lengths(8, 5, 6, 6).expand(-1, -1, 8, -1), 2) is None  # a row per token
    assert packing(None, 2) is None


@pytest.mark.parametrize(("length", "rows"), [(1, 17), (15, 248), (16, 272), (100, 1664)])
def test_few_numbers_of_rows_occur(length: int, rows: int) -> None:
    """At most SIZES, from any number of rows to its double."""
    packed = packing(of_lengths(*[length] * 16, width=128), 2)
    assert packed is not None
    assert len(packed.kept) == rows


def test_a_mask_in_16_bits() -> None:
    """float32's minimum becomes minus infinity in bfloat16."""
    packed = packing(of_lengths(8, 1, 1, 1).bfloat16(), 2)
    assert packed is not None
    assert len(packed.kept) == 12


def test_a_mask_that_is_changed_in_place() -> None:
    ours, whole, _ = pair("bert")
    given = batch()
    mask = torch.zeros(5, 1, 1, 11, dtype=torch.float64)
    mask.masked_fill_(given["attention_mask"][:, None, None] == 0, torch.finfo(mask.dtype).min)
    for _ in range(2):
        assert_same(ours, whole, given | {"attention_mask": mask})
        mask[1, ..., 1:] = torch.finfo(mask.dtype).min
        mask[3] = 0
        ours.zero_grad()
        whole.zero_grad()


def test_a_mask_for_all_texts() -> None:
    ours, whole, rows = pair("bert")
    mask = torch.zeros(1, 1, 1, 11, dtype=torch.float64)
    mask[..., 6:] = torch.finfo(mask.dtype).min
    assert_same(ours, whole, batch() | {"attention_mask": mask})
    assert rows == [55] * 3


def test_the_worst_micro_batch_is_measured_whole(
    tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """The result of `per_device_train_batch_size: auto` must hold for texts without padding, too."""
    words = job_words(tiny_model, rows_file, odd_file, Path("unused"))
    config, tokenizer = parse(TrainConfig, words, "train"), load_tokenizer(str(tiny_model))
    cpu, split = torch.device("cpu"), load_splits(config, tokenizer).train
    model, _ = plain_model(config, cpu, list("abcd"), tokenizer)
    accelerator: Any = SimpleNamespace(device=cpu, autocast=nullcontext)
    with mock.patch.object(layers, "pack", side_effect=AssertionError):
        need = measured_need(accelerator, model.train(), split, Padding(tokenizer, 64, cpu))
    assert need.per_row > 0

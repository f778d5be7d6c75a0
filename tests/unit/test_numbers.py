"""Loss, metrics and learning rates, compared with arithmetic by hand."""

import math
import pickle
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ft import metrics
from accel_ft.config import TrainConfig
from accel_ft.engine.build import _resolve_batch
from accel_ft.engine.step import unreached, weighted_loss
from accel_ft.metrics import (
    Classification,
    best_and_others,
    confusion_matrix,
    cross_entropy,
    log_odds,
    mistakes,
    roc_auc,
    score,
    softmax,
)
from accel_ft.model.optim import layer_depths, make_optimizer, make_scheduler, scaled_learning_rate


@given(cuts=st.lists(st.integers(0, 12), max_size=4), smoothing=st.sampled_from([0.0, 0.1]))
def test_loss_of_parts_adds_up_to_the_mean_of_the_whole(cuts: list[int], smoothing: float) -> None:
    """Any split of a global batch of 12, with empty parts too, gives the mean over the 12."""
    torch.manual_seed(0)
    logits, labels = torch.randn(12, 4), torch.randint(0, 4, (12,))
    whole = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    bounds = [0, *sorted(cuts), 12]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    total = sum(
        weighted_loss(logits[p], labels[p], torch.ones(len(labels[p])), smoothing) for p in parts
    )
    assert float(total) / 12 == pytest.approx(float(whole), rel=1e-6)


def test_filling_has_no_gradient() -> None:
    """A filler sample has the weight 0."""
    logits = torch.randn(2, 3, requires_grad=True)
    weighted_loss(logits, torch.tensor([0, 1]), torch.tensor([1.0, 0.0]), 0.0).backward()
    assert logits.grad is not None
    assert logits.grad[0].abs().sum() > 0
    assert logits.grad[1].abs().sum() == 0


def test_parameters_that_the_logits_do_not_need() -> None:
    parts = {name: torch.nn.Linear(2, 2) for name in ("used", "idle", "frozen")}
    model = torch.nn.ModuleDict(parts)
    model["frozen"].requires_grad_(False)
    logits = model["used"](model["used"](torch.ones(1, 2)))
    assert unreached(model, logits + logits.sum()) == ["idle.weight", "idle.bias"]


def test_class_weights_are_in_the_mean() -> None:
    """sum(weight x loss) / sum(weight) equals PyTorch's own weighted mean."""
    torch.manual_seed(0)
    logits, labels, weight = (
        torch.randn(12, 3),
        torch.randint(0, 3, (12,)),
        torch.tensor([0.5, 1.0, 4.0]),
    )
    ours = weighted_loss(logits, labels, weight[labels], 0.0) / weight[labels].sum()
    assert float(ours) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, labels, weight)), rel=1e-6
    )


def test_scores_need_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's cache may be read-only; the evaluate library makes a folder there for each metric."""
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", "/proc/nowhere")
    assert score(np.eye(2), np.arange(2), ["a", "b"])["accuracy"] == 1.0


def test_scores_by_hand() -> None:
    """Labels 0 0 0 1 1 2, predictions 0 0 1 1 0 0: hits 2, 1, 0; predicted 4, 2, 0; present 3, 2, 1."""
    labels, predictions = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 0])
    matrix = confusion_matrix(labels, predictions, 3)
    assert matrix.tolist() == [[2, 1, 0], [1, 1, 0], [1, 0, 0]]
    ids = {"predictions": predictions, "references": labels, "num_labels": 3}
    found = Classification(keep_in_memory=True).compute(**ids)
    assert found["accuracy"] == 0.5
    assert found["f1_macro"] == pytest.approx((4 / 7 + 1 / 2) / 3)
    # 6 x 3 hits - (3 x 4 + 2 x 2), over the root of (36 - 14) x (36 - 20)
    assert found["matthews_correlation"] == pytest.approx(2 / (22 * 16) ** 0.5)
    same = {"predictions": [1, 1], "references": [0, 1], "num_labels": 2}
    assert Classification(keep_in_memory=True).compute(**same)["matthews_correlation"] == 0.0
    scores = found["per_class"]
    assert scores["precision"] == [2 / 4, 1 / 2, 0]
    assert scores["recall"] == pytest.approx([2 / 3, 1 / 2, 0])
    assert scores["f1"] == pytest.approx([4 / 7, 2 / 4, 0])
    assert scores["support"] == [3, 2, 1]


def test_a_class_that_does_not_occur_is_no_zero_in_the_mean() -> None:
    """It is left out of the mean, as in scikit-learn."""
    ids = {"predictions": [0, 1], "references": [0, 1], "num_labels": 4}
    assert Classification(keep_in_memory=True).compute(**ids)["f1_macro"] == 1.0


def test_cross_entropy_by_hand_and_without_overflow() -> None:
    logits = np.array([[0.0, 0.0], [math.log(3), 0.0], [1e4, 0.0]])
    losses = cross_entropy(logits, np.array([0, 1, 0]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(4), 0.0])


def test_all_metrics_of_an_evaluation() -> None:
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0]], np.float32)
    scores = score(logits, np.array([0, 1, 0]), ["no", "yes"])
    ranked = {"matthews_correlation", "roc_auc"}
    assert set(scores) == {"loss", "accuracy", "f1_macro", "per_class"} | ranked
    assert scores["roc_auc"] == 0.5  # the row of "yes" ranks between the others
    assert scores["per_class"]["yes"] == {
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
        "support": 1,
    }


@pytest.mark.parametrize("kind", ["one label", "several"])
def test_roc_auc_counts_the_pairs_in_order(kind: str) -> None:
    """Compared with all pairs of a row with the label and a row without it; a tie counts as half."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(40, 4)).astype(np.float32)
    logits[20:25] = logits[:5]
    labels: Any = random.integers(0, 3, 40)  # no row has the fourth
    has, chances = np.eye(4)[labels], softmax(logits)
    if kind == "several":
        labels = has = (random.random((40, 4)) < [0.3, 0.5, 1.1, 0.2]).astype(np.float32)
        chances = logits
    areas = []
    for label in {"one label": (0, 1, 2), "several": (0, 1, 3)}[kind]:  # all rows have the third
        own, other = (chances[has[:, label] == which, label] for which in (1, 0))
        pairs = np.sign(own[:, None].astype(np.float32) - other.astype(np.float32))
        areas.append((pairs.mean() + 1) / 2)
    assert score(logits, labels, list("abcd"))["roc_auc"] == pytest.approx(np.mean(areas))


def test_roc_auc_of_two_labels_is_that_of_either_and_a_half_of_one() -> None:
    logits = np.array([[0.0, 1.0], [0.0, 2.0], [5.0, 5.0], [3.0, 2.0]], np.float32)
    assert roc_auc(logits, np.array([0, 1, 1, 0])) == 3 / 4
    assert roc_auc(logits, np.ones(4, np.int64)) == 0.5
    same = np.array([[0.0, 1.0], [1000.0, 1001.0]], np.float32)  # up to rounding
    assert roc_auc(same, np.array([0, 1])) == 0.5
    sure = np.array([[0, 40], [0, 45], [0, 39], [0, 60], [0, 50]], np.float32)  # all predict 1
    assert roc_auc(sure, np.array([0, 1, 0, 1, 1])) == 1.0
    far = np.array([[0, 800], [0, 900], [0, 1000], [800, 0]], np.float32)
    assert roc_auc(far, np.array([0, 1, 1, 0])) == 1.0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_log_odds_are_exact_also_where_logits_are_almost_equal_or_far_apart(scale: float) -> None:
    """Compared with 40 digits: float64 probabilities underflow at gaps of 745, float32 ones make false ties."""
    from decimal import Decimal, localcontext

    logits = (scale * np.random.default_rng(0).normal(size=(30, 4))).astype(np.float32)
    logits[:5, 1] = logits[:5].max(axis=1)  # two logits share the maximum
    with localcontext(prec=40):
        powers = [[Decimal(float(logit)).exp() for logit in row] for row in logits]
        exact = [
            [float((row[label] / sum(row[:label] + row[label + 1 :])).ln()) for label in range(4)]
            for row in powers
        ]
    rest = best_and_others(logits).T
    found = np.stack([log_odds(logits[:, label], *rest) for label in range(4)], axis=1)
    assert found == pytest.approx(np.array(exact), rel=1e-14, abs=1e-15)


def test_the_loss_of_several_labels_is_the_mean_over_rows_and_labels() -> None:
    logits, labels = torch.tensor([[2.0, -1.0, 0.5], [0.0, 400.0, -3.0]]), torch.eye(3)[:2]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    assert score(logits.numpy(), labels.numpy(), list("abc"))["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("kind", ["one label", "several"])
def test_large_tables_are_measured_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(101, 7)).astype(np.float32)
    labels: Any = random.integers(0, 7, 101)
    if kind == "several":
        labels = (random.random((101, 7)) < 0.3).astype(np.float32)
    names = list("abcdefg")
    whole, (wrong, pair) = score(logits, labels, names), mistakes(logits, labels, names)
    sizes: list[int] = []
    sigmoid, softmax = metrics.sigmoid, metrics.softmax
    monkeypatch.setattr(metrics, "sigmoid", lambda x: sizes.append(len(x)) or sigmoid(x))
    monkeypatch.setattr(metrics, "softmax", lambda x: sizes.append(len(x)) or softmax(x))
    monkeypatch.setattr(metrics, "BLOCK_CELLS", 70)
    assert score(logits, labels, names) == whole
    parts, same_pair = mistakes(logits, labels, names)
    assert max(sizes) == 10
    assert np.array_equal(parts, wrong)
    assert [same_pair(row) for row in range(101)] == [pair(row) for row in range(101)]
    monkeypatch.setattr(metrics, "BLOCK_CELLS", 1)
    assert score(logits, labels, names) == whole


def test_metrics_leave_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = pickle.dumps((np.random.get_state(), torch.get_rng_state().tolist()))
    score(np.eye(3, dtype=np.float32), np.arange(3), ["a", "b", "c"])
    assert pickle.dumps((np.random.get_state(), torch.get_rng_state().tolist())) == before


def test_learning_rate_scaling() -> None:
    config = TrainConfig(learning_rate=1e-4, lr_reference_batch_size=32, global_batch_size=128)
    rates = {
        k: scaled_learning_rate(config.resolved(lr_scaling=k)) for k in ("none", "linear", "sqrt")
    }
    assert rates == pytest.approx({"none": 1e-4, "linear": 4e-4, "sqrt": 2e-4})


def test_a_micro_batch_larger_than_the_update_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """To users of the Trainer, per_device_train_batch_size is what decides the batch size of an update."""
    config = TrainConfig(per_device_train_batch_size=64)
    assert _resolve_batch(config, 2, 1000)[0].global_batch_size == 32
    assert "has only 16 per rank. Fix, in a new run: --global_batch_size 128" in caplog.text
    caplog.clear()
    for size, ranks in ((32, 2), (16, 2), (11, 3)):  # 32 is the default
        config = TrainConfig(per_device_train_batch_size=size)
        assert _resolve_batch(config, ranks, 1000)[1] == 1
    assert not caplog.text


def test_biases_and_norms_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = make_optimizer(model, 1e-3, 0.1).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (1, 0.1),
        (3, 0.0),
    ]


def test_groups_of_models_with_tables_behind_their_layers() -> None:
    """All layers read DeBERTa-v2's positions and MPNet's two-dimensional biases: they count as embeddings."""
    from transformers import AutoModelForSequenceClassification as Auto
    from transformers import DebertaV2Config, MPNetConfig

    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    relative = {"relative_attention": True, "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c"]}
    deberta = Auto.from_config(DebertaV2Config(**sizes, **relative))
    depths = layer_depths(deberta)
    for name in ("encoder.rel_embeddings.weight", "encoder.LayerNorm.weight"):
        assert depths[f"deberta.{name}"] == depths["deberta.embeddings.word_embeddings.weight"] == 3
    assert depths["deberta.encoder.layer.1.output.dense.weight"] == 1
    mpnet = Auto.from_config(MPNetConfig(**sizes))
    table = "mpnet.encoder.relative_attention_bias.weight"
    assert layer_depths(mpnet)[table] == 3
    plain = make_optimizer(mpnet, 1e-3, 0.1).param_groups[-1]["params"]
    assert any(parameter is mpnet.get_parameter(table) for parameter in plain)


def test_depth_is_not_the_place_where_a_layer_is_declared() -> None:
    """Last norms are declared before the layers or after them, norms of embeddings after an encoder's layers."""
    from transformers import AutoModelForSequenceClassification as Auto
    from transformers import BartConfig, OPTConfig, XLMRobertaXLConfig

    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    opt = layer_depths(Auto.from_config(OPTConfig(**sizes, word_embed_proj_dim=16, ffn_dim=32)))
    assert opt["model.decoder.final_layer_norm.weight"] == 0
    assert opt["model.decoder.embed_positions.weight"] == 3
    xlmr = layer_depths(Auto.from_config(XLMRobertaXLConfig(**sizes, intermediate_size=32)))
    assert xlmr["roberta.encoder.LayerNorm.weight"] == 0
    sides = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    sides |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    bart = layer_depths(Auto.from_config(BartConfig(vocab_size=60, d_model=16, **sides)))
    for name in ("encoder.layernorm_embedding", "decoder.layernorm_embedding"):
        assert bart[f"model.{name}.weight"] == bart["model.shared.weight"] == 3
    assert bart["classification_head.dense.weight"] == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_share_of_warmup_leaves_an_update(num_steps: int) -> None:
    """The first update of a warm-up has a learning rate of 0: a later one must have the full rate."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make_scheduler(TrainConfig(warmup_steps=0.9), optimizer, num_steps)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(num_steps - 1):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert max(rates) == 1.0


@pytest.mark.parametrize(("warmup", "peak_at"), [(0.2, 2), (0.14, 2), (4, 4)])
def test_schedule_counts_updates(warmup: float, peak_at: int) -> None:
    """Linear: up to the peak during warm-up, then down to 0 after the last of 10 updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(TrainConfig(warmup_steps=warmup), optimizer, 10)
    rates = []
    for _ in range(11):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[peak_at] == max(rates) == 1.0
    assert rates[0] == rates[10] == 0.0
    assert rates[peak_at + 1] == pytest.approx(1 - 1 / (10 - peak_at))


@pytest.mark.parametrize("name", get_args(TrainConfig.model_fields["lr_scheduler_type"].annotation))
def test_a_run_that_is_all_warm_up(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(
        TrainConfig(warmup_steps=3, lr_scheduler_type=name), optimizer, num_steps=3
    )
    rates = []
    for _ in range(3):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == ([1.0] * 3 if name == "constant" else pytest.approx([0, 1 / 3, 2 / 3]))

"""Texts end to end: the same logits, gradients and curve as of rectangles. The kernel of a GPU is
tested in tests/distributed/test_gpu.py.
"""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import job_words
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from test_first_token import DROPOUT, classifier
from test_graphs import made  # noqa: F401

from accel_ft.data.loader import Padding
from accel_ft.engine import build
from accel_ft.engine.graphs import Graphs
from accel_ft.model import load
from accel_ft.model.first_token import KINDS, leave_out_the_rest, takes_texts_end_to_end
from accel_ft.model.varlen import is_supported
from accel_ft.train import main


def rows_of(*lengths: int, types: bool = False) -> list[NDArray[np.int32]]:
    """Rows of token ids, [1, T], or ids and types, [2, T]."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 60, (1, length), np.int32) for length in lengths]
    return [np.concatenate([row, row % 2]) if types else row for row in rows]


@pytest.fixture
def pad() -> Padding:
    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0, 2]}

    tokenizer = Tokenizer(pad_token_id=1, padding_side="right")
    return Padding(tokenizer, 36, torch.device("cuda"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("lengths", [(11, 3, 7, 1, 10), (36, 30, 36, 35, 36)], ids=str)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_and_gradients_are_those_of_a_rectangle(
    kind: str, lengths: tuple[int, ...], adapters: bool, pad: Padding
) -> None:
    whole = classifier(kind, "sdpa", **dict.fromkeys(DROPOUT, 0.0)).train()
    flat = copy.deepcopy(whole)
    leave_out_the_rest(flat)
    if adapters:
        modules = "q_lin v_lin" if kind == "distilbert" else "query value"
        lora = LoraConfig(r=2, target_modules=modules.split(), init_lora_weights=False)
        torch.manual_seed(1)
        whole = get_peft_model(whole, lora)
        torch.manual_seed(1)
        flat = get_peft_model(flat, lora)
    rows = rows_of(*lengths, types=kind in ("bert", "electra"))
    for model, batch in ((whole, pad(rows)), (flat, pad.end_to_end(rows))):
        model.logits = model(**batch).logits
        torch.nn.functional.cross_entropy(model.logits, torch.arange(5) % 3).backward()
    torch.testing.assert_close(flat.logits, whole.logits)
    for (name, a), (_, b) in zip(flat.named_parameters(), whole.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_end_to_end(pad: Padding) -> None:
    batch = pad.end_to_end(rows_of(20, 3, 18, types=True))
    ids, starts = batch["input_ids"][0], batch["cu_seq_lens_q"]
    assert torch.equal(ids[:20], torch.from_numpy(rows_of(20)[0][0]).long())
    assert ids[41:].tolist() == [1] * 7
    assert starts.tolist() == [0, 20, 23, 41, 48]
    assert batch["attention_mask"].sum(1).tolist() == [20, 3, 18]
    assert torch.equal(batch["token_type_ids"][0, :41], ids[:41] % 2)
    assert pad.end_to_end(rows_of(20, 20))["cu_seq_lens_q"].tolist() == [0, 20, 40, 40]


def test_few_numbers_of_tokens_and_little_padding(pad: Padding) -> None:
    """No text of padding is longer than the attention is told; eight numbers, then sixteen."""
    for least, step in ((256, 32), (4096, 512), (8192, 512)):
        sizes = set()
        for total in range(least, 2 * least, 17):
            lengths = [36] * (total // 36) + [total % 36] * (total % 36 > 0)
            batch = pad.end_to_end(rows_of(*lengths))
            starts, size = batch["cu_seq_lens_q"], batch["input_ids"].shape[1]
            assert 0 <= size - total < step
            assert starts[0] == 0
            assert starts[-1] == size
            assert starts.diff().min() >= 0
            assert starts.diff().max() <= batch["attention_mask"].shape[1] == 36
            sizes.add((size, len(starts) - len(lengths)))
        assert len(sizes) <= least // step + 1


@pytest.mark.parametrize("flat", [False, True])
def test_dropout_is_on_in_training_alone(flat: bool, pad: Padding) -> None:
    """That of the attention of all layers but the last."""
    model = classifier("bert", "sdpa", **dict.fromkeys(DROPOUT, 0.0) | {DROPOUT[1]: 0.5})
    leave_out_the_rest(model)
    model.bert.encoder.layer[-1].attention.self.dropout.p = 0.0
    batch = (pad.end_to_end if flat else pad)(rows_of(9, 5, 12))
    for training in (True, False):
        model.train(training)
        assert torch.equal(*[model(**batch).logits for _ in range(2)]) != training


def recorded(_: Any, __: Any, model: Any, *others: Any) -> Graphs:
    return Graphs(model.parameters())


@pytest.mark.usefixtures("made")
def test_a_run_has_the_same_curve(
    tmp_path: Path,
    still_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several micro-batches an update; recorded, too, as on a GPU."""
    for_training = load.load_for_training
    monkeypatch.setattr(
        load, "load_for_training", lambda folder, config, _: for_training(folder, config, None)
    )
    monkeypatch.setattr(build, "make_sparse", lambda model: None)
    curves, means = [], []
    for name in ("rectangles", "end to end", "recorded"):
        if name == "end to end":
            monkeypatch.setattr(build, "_end_to_end", lambda *_: True)
        if name == "recorded":
            monkeypatch.setattr(build, "_graphs", recorded)
        run = tmp_path / name
        main([*job_words(still_model, rows_file, odd_file, run), "--num_train_epochs", "6"])
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = [event for event in events if event["event"] == "train"]
        curves.append([event["loss"] for event in trained])
        padding = [event["padding"] for event in trained]
        means.append(float(np.mean(padding)))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == curves[1]
    assert means[1] == means[2] < means[0] / 2


@pytest.mark.parametrize(
    ("given", "is_done"),
    [
        ({}, True),
        ({"device": torch.device("cpu")}, False),
        ({"left": True}, False),
        ({"path": "eager"}, False),
        ({"kind": "albert"}, False),
        ({"backend": "inductor"}, False),
        ({"precision": "fp16"}, False),
    ],
    ids=str,
)
def test_what_gets_it(
    given: dict[str, Any], is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", given.get("backend", "no"))
    accelerator: Any = SimpleNamespace(
        device=given.get("device", torch.device("cuda")),
        mixed_precision=given.get("precision", "bf16"),
    )
    asked = []

    def is_supported(config: Any, device: torch.device, kind: torch.dtype) -> bool:
        asked.append(config)
        return kind == torch.bfloat16

    monkeypatch.setattr(build.varlen, "is_supported", is_supported)
    model = classifier(given.get("kind", "bert"), given.get("path", "sdpa"))
    padding: Any = SimpleNamespace(left=given.get("left", False))
    assert build._end_to_end(accelerator, padding, model) == is_done
    assert asked == [model.config] * (is_done or "precision" in given)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_device_without_the_kernel(kind: str) -> None:
    assert not is_supported(classifier(kind).config, torch.device("cpu"), torch.bfloat16)


def test_other_models_do_not() -> None:
    assert takes_texts_end_to_end(classifier("bert", "sdpa"))
    assert not takes_texts_end_to_end(classifier("bert", "sdpa", is_decoder=True))

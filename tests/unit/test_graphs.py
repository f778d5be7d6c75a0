"""Passes that are recorded and replayed. In place of a CUDA graph, a function runs them again: no GPU is needed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import job_words
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_ft.config import TrainConfig
from accel_ft.data.loader import Padding
from accel_ft.data.splits import load_splits
from accel_ft.doctor import main as doctor
from accel_ft.engine import loop, nonfinite
from accel_ft.engine.build import _graphs
from accel_ft.engine.graphs import MOST, Graphs, can_record
from accel_ft.engine.run import Run
from accel_ft.model import layer, load
from accel_ft.settings import parse
from accel_ft.train import main

Made = list[int]
BACKWARD = torch.autograd.backward  # a replay calls nothing that was patched after the recording


class Capture(TorchDispatchMode):
    """Forbids what a CUDA graph forbids: the host may not read what the device computes."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function != torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Make a replay run the recorded work; return how often each recording was replayed. As on a GPU, no
    layer leaves out padding.
    """
    counts: Made = []
    monkeypatch.setattr(layer, "packing", lambda *_: None)

    def record(self: Graphs, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        result, number = torch.zeros((), dtype=torch.float64), len(counts)
        counts.append(0)

        def replay() -> None:
            counts[number] += 1
            with Capture(), mock.patch.object(torch.autograd, "backward", BACKWARD):
                result.copy_(work())

        return replay, result

    monkeypatch.setattr(Graphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (90, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10)
    return counts


@pytest.fixture
def on_graphs(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Let jobs record graphs, as on a GPU."""
    from accel_ft.engine import build

    monkeypatch.setattr(build, "make_sparse", lambda model: None)
    monkeypatch.setattr(build, "_graphs", graphs_of)
    return made


def graphs_of(_: Any, accelerator: Any, model: nn.Module, *others: Any) -> Graphs:
    return Graphs(model.parameters(), accumulates=accelerator.gradient_accumulation_steps > 1)


def batch_of(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(9, (rows, tokens))
    return {"input_ids": ids, "weights": torch.rand(rows)}


def passes_of(model: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    def passes(batch: Any, scale: Any) -> torch.Tensor:
        values = model(batch["input_ids"].double().mean(1, keepdim=True))
        loss = (values.squeeze(1) * batch["weights"]).sum()
        (loss * scale).backward()
        return loss.detach()

    return passes


@pytest.mark.parametrize("accumulates", [True, False])
def test_losses_and_gradients_of_each_shape_are_those_of_the_passes(
    made: Made, accumulates: bool
) -> None:
    """Gradients of several micro-batches add up; those of a single one are overwritten. A parameter that no
    pass reaches gets no gradient; a returned loss is not overwritten by the next.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model.idle = nn.Parameter(torch.ones(2))
    passes, plain = passes_of(model), Graphs()
    graphs, optimizer = (
        Graphs(model.parameters(), accumulates=accumulates),
        torch.optim.SGD(model.parameters()),
    )
    shapes = [(4, 8), (4, 16), (4, 8), (4, 16), (3, 8), (4, 8), (4, 8)]
    batches = [batch_of(*shape) for shape in shapes]
    found = []
    for used in (plain, graphs):
        model.zero_grad()
        losses = []
        for update in range(2):
            gradients = []
            for number, batch in enumerate(batches, 1):
                losses.append(used(passes, batch, 0.5 + update))
                if not accumulates or number == len(batches):
                    held = [p.grad for p in model.parameters() if p.grad is not None]
                    gradients += [gradient.clone() for gradient in held]
                    used.clear_gradients(optimizer)
                    if used is graphs:
                        assert all(bool(gradient.any()) != accumulates for gradient in held)
        found.append((torch.stack(losses), *gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=0)
    assert model.idle.grad is None
    assert made == [3 + 4, 1 + 2, 1]  # replayed from the second time on


def test_gradients_that_lie_elsewhere_are_recorded_anew(made: Made) -> None:
    """Graphs write to the gradients they were recorded with: if these are replaced, shapes are recorded again."""
    model = nn.Linear(1, 1).double()
    graphs, batch = Graphs(model.parameters()), batch_of(4, 8)
    for _ in range(3):
        graphs(passes_of(model), batch, 1.0)
    model.zero_grad()
    graphs(passes_of(model), batch, 1.0)  # not replayed: there is no gradient to add to
    once = model.weight.grad.clone()
    graphs(passes_of(model), batch, 1.0)
    assert torch.equal(model.weight.grad, 2 * once)
    assert made == [2, 1]


def test_there_are_not_too_many(made: Made) -> None:
    """At most MOST shapes are recorded."""
    model = nn.Linear(1, 1).double()
    graphs = Graphs(model.parameters())
    for tokens in range(MOST + 3):
        for _ in range(2):
            graphs(passes_of(model), batch_of(1, tokens + 1), 1.0)
    assert len(made) == MOST


def test_room_is_left_for_the_longest_micro_batch(made: Made) -> None:
    """After 8 tokens 10 of 100 bytes are held: 32 tokens would need 40, more than a third."""
    model = nn.Linear(1, 1).double()
    graphs = Graphs(model.parameters(), most_tokens=32)
    for tokens, num_made in ((8, 0), (8, 0), (16, 0), (16, 1), (8, 2)):
        graphs(passes_of(model), batch_of(1, tokens), 1.0)
        assert len(made) == num_made


@pytest.mark.parametrize("at_once", ["4", "8"])
@pytest.mark.usefixtures("made")
def test_a_run_with_graphs_is_the_run_without(
    request: pytest.FixtureRequest,
    at_once: str,
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, with dropout and clipping; several micro-batches an update, or one."""
    from accel_ft.engine import build

    monkeypatch.setattr(build, "make_sparse", lambda model: None)
    weights, made = [], []
    for name in ("plain", "graphs"):
        if name == "graphs":
            made = request.getfixturevalue("on_graphs")
        words = job_words(tiny_model, rows_file, odd_file, tmp_path / name)
        main([*words, "--per_device_train_batch_size", at_once, "--num_train_epochs", "6"])
        weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert sum(made) > 6
    assert weights[0] == weights[1]


@pytest.mark.parametrize("at_once", ["4", "8"])
@pytest.mark.usefixtures("made")
def test_a_rollback_records_anew(
    request: pytest.FixtureRequest,
    at_once: str,
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The restored loss scale is another tensor than the recorded one; nothing of the NaN gradients may
    remain.
    """
    from accel_ft.engine import build

    weighted_loss, resume, calls, seen, weights = loop.weighted_loss, nonfinite.resume, 0, [], []

    def sick_once(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return weighted_loss(*args) * (float("nan") if calls == 9 else 1.0)

    def watched_resume(run: Run, folder: Path) -> list[Path]:
        before, run.logits = len(run.graphs.recorded), np.zeros((1, 4), np.float32)
        lost = resume(run, folder)
        assert run.logits is None  # they are of weights that are rolled back
        seen.append((before, len(run.graphs.recorded), run.graphs.are_used))
        return lost

    monkeypatch.setattr(build, "make_sparse", lambda model: None)
    monkeypatch.setattr(loop, "weighted_loss", sick_once)
    monkeypatch.setattr(nonfinite, "resume", watched_resume)
    for name in ("plain", "graphs"):
        if name == "graphs":
            request.getfixturevalue("on_graphs")
        calls, run = 0, tmp_path / name
        job = [*job_words(tiny_model, rows_file, odd_file, run), "--max_seq_length", "8"]
        job += ["--on_nonfinite", "rollback", "--per_device_train_batch_size", at_once]
        main(job)
        weights.append((run / "model" / "model.safetensors").read_bytes())
    assert seen == [(0, 0, False), (1, 0, True)]
    assert weights[0] == weights[1]


def test_the_doctor_finds_nothing(
    on_graphs: Made,
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The doctor records the loop's backward passes; a replay calls none."""
    job = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    doctor([*job, "--max_seq_length", "8"])  # one width, so that shapes repeat
    assert "FAIL" not in capsys.readouterr().out
    assert sum(on_graphs) >= 3


def test_what_a_job_on_one_gpu_gets(
    tiny_model: Path, rows_file: Path, odd_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is planned for a micro-batch of the longest rows. There are no graphs with cuda_graphs: false, on
    a CPU, or with a compiler that records its own.
    """
    words = job_words(tiny_model, rows_file, odd_file, Path("unused"))
    config, tokenizer = parse(TrainConfig, words, "train"), load.load_tokenizer(str(tiny_model))
    split = load_splits(config, tokenizer).train
    model_config = load.load_model_config(str(tiny_model), num_labels=4)
    model, _ = load.load_for_training(str(tiny_model), model_config, torch.device("cpu"))
    unwrap = SimpleNamespace(unwrap_model=lambda model, **_: model, gradient_accumulation_steps=1)

    def made_for(device: str, config: TrainConfig) -> Graphs:
        unwrap.device = torch.device(device)
        pad = Padding(tokenizer, config.max_seq_length, unwrap.device)
        return _graphs(config, unwrap, model, pad, split)

    graphs = made_for("cuda", config)
    longest = max(len(row[0]) for row in split.tokens(np.arange(len(split))))
    assert graphs.most_tokens == 4 * -(-longest // 8) * 8
    assert len(graphs.parameters) == len(list(model.parameters()))
    assert not graphs.accumulates
    unwrap.gradient_accumulation_steps = 2
    assert made_for("cuda", config).accumulates
    assert not made_for("cpu", config).are_used
    assert not made_for("cuda", config.resolved(cuda_graphs=False)).are_used
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    assert made_for("cuda", config).are_used
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    assert not made_for("cuda", config).are_used


def test_which_models_can_be_recorded(tiny_model: Path) -> None:
    config = load.load_model_config(str(tiny_model), num_labels=2)
    model, _ = load.load_for_training(str(tiny_model), config, torch.device("cpu"))
    assert can_record(model)
    layer = model.bert.encoder.layer[0]
    layer.gradient_checkpointing = True  # its random state is kept on the host
    assert not can_record(model)
    layer.gradient_checkpointing = False
    model.config._attn_implementation = "flash_attention_2"  # it asks whether there is padding
    assert not can_record(model)
    model.config._attn_implementation = "sdpa"
    model.config.model_type = "deberta-v2"  # each pass copies a constant from the host
    assert not can_record(model)

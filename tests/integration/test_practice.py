"""The keys around the loop: each does what it says, and goes on exactly after a resume."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import events_of, job_words, run_hash, write_rows
from safetensors.torch import load_file, save_file

from accel_ft import train
from accel_ft.checkpoint import transaction
from accel_ft.config import TrainConfig
from accel_ft.data.splits import load_splits
from accel_ft.errors import CheckpointError, ConfigError
from accel_ft.model import load
from accel_ft.model.adapters import choose_trained
from accel_ft.model.optim import layer_depths, make_optimizer


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path) -> list[str]:
    """A job of 12 updates into tmp_path / "run"."""
    return job_words(tiny_model, rows_file, odd_file, tmp_path / "run")


def cut_off(folder: Path, step: int) -> None:
    """Leave of a finished run what a kill after update `step` would have."""
    for number, path in transaction.list_published(folder / "checkpoints"):
        if number > step:
            transaction.remove(path)
    transaction.remove(folder / "model")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))


# Model selection


def test_early_stopping(words: list[str], tmp_path: Path) -> None:
    """No loss falls by 100: the first evaluation counts, three that are not better enough end it."""
    words += ["--eval_steps", "1", "--early_stopping_patience", "3"]
    words += ["--metric_for_best_model", "loss", "--early_stopping_threshold", "100"]
    train.main(words)
    end = events_of(tmp_path / "run")[-1]
    assert (end["event"], end["step"], end["num_worse"]) == ("end", 4, 3)
    assert (tmp_path / "run/checkpoints/step_00000004").is_dir()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    train.main([*words, "--resume_from_checkpoint", "latest"])  # it is finished
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    train.main(
        [*words, "--resume_from_checkpoint", "latest", "--early_stopping_patience", "5"]
    )  # more patience goes on
    assert events_of(tmp_path / "run")[-1]["step"] == 6


def test_early_stopping_goes_on_after_a_resume(words: list[str], tmp_path: Path) -> None:
    """The evaluations before a kill count, also those that no later checkpoint holds."""
    words += ["--learning_rate", "1e-30", "--eval_steps", "1", "--early_stopping_patience", "3"]
    words += ["--early_stopping_threshold", "0.01"]
    train.main(words)
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 2)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert events_of(tmp_path / "run")[-1]["step"] == 4
    assert run_hash(tmp_path / "run") == whole


def test_greater_is_better_turns_the_choice_round(words: list[str], tmp_path: Path) -> None:
    words += ["--load_best_model_at_end", "--eval_steps", "1", "--metric_for_best_model", "loss"]
    train.main([*words, "--greater_is_better", "true"])
    events = events_of(tmp_path / "run")
    losses = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval"}
    assert events[-1]["model_step"] == max(losses, key=losses.get)


@pytest.mark.parametrize("step", [3, 5, 11])
def test_the_best_model_after_a_resume(step: int, words: list[str], tmp_path: Path) -> None:
    """The same evaluation is the best, under the name that transformers gives the metric."""
    words += ["--load_best_model_at_end", "--eval_steps", "1", "--save_total_limit", "2"]
    words += ["--metric_for_best_model", "eval_f1_macro"]
    train.main(words)
    whole = run_hash(tmp_path / "run")
    best = events_of(tmp_path / "run")[-1]["model_step"]
    assert 1 < best < 12
    again = [*words, "--output_dir", str(tmp_path / "again")]
    with pytest.raises(RuntimeError):
        stopped_at(step, again)
    train.main([*again, *LATEST])
    assert run_hash(tmp_path / "again") == whole


# Imbalance


@pytest.fixture
def rare_file(tmp_path: Path) -> Path:
    """30 rows of one label, 7 of another."""
    path = tmp_path / "rare.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ["text", "label"],
                *([f"goal {n}", "Sports"] for n in range(30)),
                *([f"bank {n}", "Business"] for n in range(7)),
            ]
        )
    return path


def test_oversampling(tiny_model: Path, rare_file: Path, odd_file: Path, tmp_path: Path) -> None:
    """Both labels come equally often, all rows come, the rare ones four or five times."""
    config = TrainConfig(train_file=rare_file, validation_file=rare_file, max_seq_length=32)
    split = load_splits(config, load.load_tokenizer(str(tiny_model))).train
    plain = split.fingerprint()
    split.oversample()
    places = np.arange(len(split))
    assert len(split) == 60
    assert np.bincount(split.labels(places)).tolist() == [30, 30]
    times = np.bincount(split.ids(places), minlength=37)
    assert (times[:30] == 1).all()
    assert set(times[30:]) == {4, 5}
    assert split.fingerprint() != plain


def test_an_oversampled_run_resumes(
    words: list[str], tiny_model: Path, rare_file: Path, tmp_path: Path
) -> None:
    words += ["--oversampling", "balanced", "--train_file", str(rare_file)]
    words += ["--validation_file", str(rare_file), "--test_file", str(rare_file)]
    train.main(words)
    whole = run_hash(tmp_path / "run")
    assert events_of(tmp_path / "run")[-1]["step"] == 16  # 2 epochs of 60 rows
    cut_off(tmp_path / "run", 3)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert run_hash(tmp_path / "run") == whole


# What is trained


def test_a_frozen_encoder(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    train.main([*words, "--freeze", "encoder", "--learning_rate", "0.1"])
    before = load_file(tiny_model / "model.safetensors")
    after = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(before[name], after[f"bert.{name}"]) for name in before)
    saved = [
        load_file(p / "model.safetensors") for p in sorted((tmp_path / "run/checkpoints").iterdir())
    ]
    assert not torch.equal(saved[0]["classifier.weight"], saved[-1]["classifier.weight"])
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 5)
    train.main(
        [
            *words,
            "--freeze",
            "encoder",
            "--learning_rate",
            "0.1",
            "--resume_from_checkpoint",
            "latest",
        ]
    )
    assert run_hash(tmp_path / "run") == whole


def plain(model: Path) -> torch.nn.Module:
    config = load.load_model_config(str(model), num_labels=4)
    return load.load_for_training(str(model), config, torch.device("cpu"))[0]


def test_layerwise_learning_rates(tiny_model: Path) -> None:
    """Two layers: the head at the full rate, the upper layer at a half, the embeddings at an eighth."""
    model = plain(tiny_model)
    optimizer = make_optimizer(model, 1.0, 0.01, 0.5)
    rate_of = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    rates = {name: rate_of[id(p)] for name, p in model.named_parameters()}
    assert rates["classifier.weight"] == rates["bert.pooler.dense.bias"] == 1.0
    assert rates["bert.encoder.layer.1.output.dense.weight"] == 0.5
    assert rates["bert.encoder.layer.0.attention.self.query.bias"] == 0.25
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.125
    assert len(rates) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 1.0  # the one that is logged
    assert set(layer_depths(torch.nn.Linear(2, 2)).values()) == {0}


def test_a_layerwise_run(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--layerwise_lr_decay", "0.5"])
    rates = [e["learning_rate"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    assert max(rates) == pytest.approx(1e-3)


def test_gradient_checkpointing_changes_no_number(words: list[str], tmp_path: Path) -> None:
    """Dropout draws the same mask again in the backward pass."""
    train.main(words)
    train.main([*words, "--gradient_checkpointing", "--output_dir", str(tmp_path / "again")])
    assert run_hash(tmp_path / "run") == run_hash(tmp_path / "again")


def test_checkpointing_is_asked_of_the_model(tiny_model: Path) -> None:
    model = plain(tiny_model)
    choose_trained(model, TrainConfig(gradient_checkpointing=True))
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    type(model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ConfigError, match="BertForSequenceClassification cannot"):
            choose_trained(model, TrainConfig(gradient_checkpointing=True))
    finally:
        del type(model).supports_gradient_checkpointing


# Trackers


def test_tensorboard_reads_what_was_logged(words: list[str], tmp_path: Path) -> None:
    """Also after a resume: what comes again takes the place of what was written before."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words += ["--report_to", "tensorboard"]
    train.main(words)
    cut_off(tmp_path / "run", 5)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    read = EventAccumulator(str(tmp_path / "run/trackers/accel_ft"))
    read.Reload()
    expected = {e["step"]: e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"}
    found = {scalar.step: scalar.value for scalar in read.Scalars("train/loss")}
    assert found == pytest.approx(expected)
    assert len(read.Scalars("train/loss")) == 12
    assert [scalar.step for scalar in read.Scalars("eval/accuracy")] == [6, 12]
    assert [scalar.step for scalar in read.Scalars("test/accuracy")] == [12]


def test_trackio_reads_what_was_logged(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    script = tmp_path / "read.py"
    script.write_text(
        "import json, sys\n"
        "from accel_ft import train\n"
        "train.main(sys.argv[1:])\n"
        "import trackio\n"
        "api = trackio.Api()\n"
        "(run,) = api.runs('accel_ft')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('accel_ft', run.name)\n"
        "print(json.dumps([row['train/loss'] for row in rows if 'train/loss' in row]))\n"
    )
    from conftest import run

    done = run(
        "python",
        script,
        *words,
        "--report_to",
        "trackio",
        env={"TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    losses = [e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert json.loads(line) == pytest.approx(losses)


def test_a_tracker_that_is_not_there(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="report_to=tensorbord: no such tracker. Did you mean"):
        train.main([*words, "--report_to", "tensorbord"])
    with pytest.raises(ConfigError, match="report_to=clearml: is not installed"):
        train.main([*words, "--report_to", "clearml"])


def test_a_tracker_that_fails_ends_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    def fail(self: Accelerator, *_: object, **__: object) -> None:
        raise OSError("the service is down")

    monkeypatch.setattr(Accelerator, "log", fail)
    pytest.importorskip("tensorboard")
    train.main([*words, "--report_to", "tensorboard"])
    assert events_of(tmp_path / "run")[-1]["event"] == "end"


# Adapters


LORA = ["--lora_r", "4", "--learning_rate", "0.02", "--lora_dropout", "0.1"]


def test_adapters(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    """Checkpoints hold adapters and head, model/ the merged whole, which scores the same."""
    from accel_ft import load_classifier

    train.main([*words, *LORA])
    run = tmp_path / "run"
    checkpoint = max((run / "checkpoints").iterdir())
    saved = load_file(checkpoint / "model.safetensors")
    assert all("lora_" in name or "classifier" in name for name in saved)
    whole = load_file(run / "model/model.safetensors")
    assert sum(v.numel() for v in saved.values()) < 0.4 * sum(v.numel() for v in whole.values())
    assert not any("lora" in name for name in whole)
    before = load_file(tiny_model / "model.safetensors")
    assert torch.equal(
        before["embeddings.word_embeddings.weight"], whole["bert.embeddings.word_embeddings.weight"]
    )
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[name], whole[f"bert.{name}"])
    texts = ["goal striker league", "shares profit bank", "orbit chip"]
    scores = load_classifier(run, all_scores=True).predict(texts)
    for again in (checkpoint, run / "model"):
        assert load_classifier(again, all_scores=True).predict(texts) == scores


def architectures() -> dict[str, Any]:
    """Small models of several kinds, whose pretrained part has no head."""
    from transformers import (
        BertConfig,
        DebertaV2Config,
        DistilBertConfig,
        GPT2Config,
        ModernBertConfig,
        RobertaConfig,
    )  # fmt: skip

    small = {"vocab_size": 60, "pad_token_id": 0}
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return {
        "bert": BertConfig(**small, **sizes),
        "roberta": RobertaConfig(**small, **sizes),
        "deberta": DebertaV2Config(**small, **sizes),
        "modernbert": ModernBertConfig(**small, **sizes),
        "distilbert": DistilBertConfig(**small, dim=16, hidden_dim=32, n_layers=2, n_heads=2),
        "gpt2": GPT2Config(**small, n_embd=16, n_layer=2, n_head=2),
    }


@pytest.mark.parametrize("targets", [(), "first"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta", "modernbert", "distilbert", "gpt2"])
def test_what_is_drawn_is_trained_and_saved(kind: str, targets: object, tmp_path: Path) -> None:
    """Heads come in many shapes; nothing of them may be frozen at random, or drawn again."""
    from transformers import AutoModel

    from accel_ft.model import adapters

    torch.manual_seed(0)
    AutoModel.from_config(architectures()[kind]).save_pretrained(tmp_path)
    config = load.load_model_config(str(tmp_path), num_labels=3)
    plain, drawn = load.load_for_training(str(tmp_path), config, None)
    assert drawn
    frozen = choose_trained(plain, TrainConfig(freeze="encoder"), drawn)
    assert {n for n, p in frozen.named_parameters() if p.requires_grad} >= set(drawn)
    plain, drawn = load.load_for_training(str(tmp_path), config, None)
    if targets == "first":
        linear = [
            n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear | adapters.Conv1D)
        ]
        targets = (next(n.rpartition(".")[2] for n in linear if "." in n),)
    job = TrainConfig(model_name_or_path=str(tmp_path), lora_r=2, lora_target_modules=targets)
    model = choose_trained(plain, job, drawn)
    trained = {
        n.replace(".modules_to_save.default", "").removeprefix("base_model.model.")
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert set(drawn) <= trained
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval()
    ids = torch.tensor([[5, 6, 7, 8, 0], [9, 10, 11, 12, 13]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = model(**inputs).logits
    weights = dict(model.state_dict())
    torch.manual_seed(1)  # what is drawn now must not matter
    again = adapters.merged(config, adapters.peft_config(model).to_dict(), weights).eval()
    torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    if kind != "gpt2":
        name = next(iter(weights))
        with pytest.raises(CheckpointError, match="its adapters are not those of"):
            adapters.merged(
                config,
                adapters.peft_config(model).to_dict(),
                {k: v for k, v in weights.items() if k != name},
            )


def test_adapters_resume_bit_for_bit(words: list[str], tmp_path: Path) -> None:
    train.main([*words, *LORA])
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 5)
    train.main([*words, *LORA, "--resume_from_checkpoint", "latest"])
    assert run_hash(tmp_path / "run") == whole


def test_adapters_are_exported(words: list[str], tmp_path: Path) -> None:
    from accel_ft import export, load_classifier

    train.main([*words, *LORA])
    checkpoint = max((tmp_path / "run/checkpoints").iterdir())
    export.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "exported")])
    ours, theirs = (
        load_file(tmp_path / f / "model.safetensors") for f in ("exported", "run/model")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert load_classifier(tmp_path / "exported").predict(["goal"])[0]["label"]


def test_layers_that_are_not_there(words: list[str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"lora_r=4: .*nothing.*Linear layers: dense, key, query, value|lora_r=4: ",
    ):
        train.main([*words, *LORA, "--lora_target_modules", "nothing"])
    with pytest.raises(ConfigError, match="freeze=encoder: given together with lora_r=4"):
        train.main([*words, *LORA, "--freeze", "encoder"])


# Report, reproduction


def test_the_report(words: list[str], tmp_path: Path, rows_file: Path) -> None:
    """Texts and labels are escaped; the numbers of the test rows are in it; several runs overlay."""
    from accel_ft import report
    from accel_ft.reporting import figures
    from accel_ft.reporting.record import read_record

    evil = tmp_path / "evil.csv"
    with evil.open("w", newline="") as file:
        rows = [["<script>alert(1)</script> goal", "<b>Sports</b>"], ["bank $x_1$", "A & B"]] * 8
        csv.writer(file).writerows([["text", "label"], *rows])
    words += ["--train_file", str(evil), "--validation_file", str(evil), "--test_file", str(evil)]
    words += ["--report_to", "html"]
    train.main(words)
    run = tmp_path / "run"
    page = (run / "report.html").read_text()
    mistake = '<td class="text">&lt;script&gt;alert(1)&lt;/script&gt; goal</td>'
    assert mistake in page or '<td class="text">bank $x_1$</td>' in page
    assert re.search(r'\d\.\d{3} <span class="range">\d\.\d{3}.\d\.\d{3}</span>', page)
    assert "<td>4</td><td>save</td>" in page
    assert "<td>learning_rate</td><td><pre>0.001</pre>" in page
    assert "<td>sample order sha256</td>" in page
    assert "<script>" not in page
    assert "<b>Sports" not in page
    assert "&lt;b&gt;Sports&lt;/b&gt;" in page
    assert "A &amp; B" in page
    assert "http" not in page.replace("http-equiv", "")  # self-contained
    assert {path.stem for path in (run / "report").iterdir()} == {
        "train_loss", "train_learning_rate", "train_grad_norm", "train_samples_per_second",
        "eval_loss", "eval_accuracy", "eval_f1_macro", "eval_matthews_correlation",
        "confusion_0", "reliability_0",
    }  # fmt: skip
    with np.load(run / "predictions.npz") as saved:
        accuracy = float((saved["logits"].argmax(1) == saved["labels"]).mean())
    assert accuracy == pytest.approx(events_of(run)[-2]["test_accuracy"])
    mistakes = [json.loads(line) for line in (run / "mistakes.jsonl").read_text().splitlines()]
    assert len(mistakes) == round(16 * (1 - accuracy))
    assert all(each["label"] != each["predicted"] for each in mistakes)
    train.main([*words, "--output_dir", str(tmp_path / "other"), "--seed", "1"])
    report.main([str(run), str(tmp_path / "other"), "--output", str(tmp_path / "both")])
    page = (tmp_path / "both/report.html").read_text()
    assert "<h2>run</h2>" in page
    assert "<h2>other</h2>" in page
    records = [read_record(folder) for folder in (run, tmp_path / "other")]
    assert {len(figure.axes[0].lines) for figure in figures.curves(records).values()} == {2}


def test_a_report_of_runs_of_one_name_and_of_one_that_goes_on(
    words: list[str], tmp_path: Path
) -> None:
    from accel_ft import report

    folders = [tmp_path / "a/run", tmp_path / "b/run"]
    for folder in folders:
        train.main([*words, "--output_dir", str(folder)])
    cut_off(folders[0], 6)
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] not in ("eval", "test", "end")]
    (folders[0] / "metrics.jsonl").write_text("".join(kept))
    for name in ("predictions.npz", "mistakes.jsonl"):
        (folders[0] / name).unlink()
    report.main([*map(str, folders), "--output", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    for folder in folders:
        assert f"<h2>{folder}</h2>" in page
    assert "<th>accuracy</th>" in page  # the first one has none
    cut_off(folders[1], 6)
    with pytest.raises(RuntimeError):
        stopped_at(8, [*words, "--output_dir", str(folders[1]), *LATEST])
    assert not (folders[1] / "predictions.npz").exists()  # of the model that is no more
    assert not (folders[1] / "mistakes.jsonl").exists()


LATEST = ["--resume_from_checkpoint", "latest"]


def stopped_at(step: int, words: list[str]) -> None:
    """Train until an update fails."""
    from accel_ft.engine.run import Run

    after = Run.after_update

    def fail(run: Run) -> None:
        if run.step == step:
            raise RuntimeError("stopped")
        after(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after_update", fail)
        train.main(words)


def test_what_a_rewound_log_keeps(tmp_path: Path) -> None:
    """When and why a run was started and stopped stays, also where it goes on from before that."""
    from accel_ft.runtime.logging import EventLog

    log = EventLog(tmp_path / "metrics.jsonl", writes=True)
    for step, event in enumerate(["train", "resume", "train", "preempted", "save", "end"], start=1):
        log.write(event, step)
    log.write("nonfinite", 7, policy="stop")
    log.write("nonfinite", 7, policy="skip")
    log.rewind(1)
    kept = [(event["step"], event["event"]) for event in events_of(tmp_path)]
    assert kept == [(1, "train"), (2, "resume"), (4, "preempted"), (7, "nonfinite")]


def test_a_report_of_no_run(tmp_path: Path) -> None:
    from accel_ft import report

    with pytest.raises(ConfigError, match="holds no run of accel_ft"):
        report.main([str(tmp_path)])


def test_calibration_and_intervals() -> None:
    from accel_ft.reporting.record import calibration, intervals

    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, True, True, False, True, False])
    rows, error = calibration(confidence, correct)
    assert rows.tolist() == pytest.approx(np.array([[0.55, 0.5, 1 / 3], [0.95, 0.75, 2 / 3]]))
    assert error == pytest.approx(0.05 / 3 + 0.2 * 2 / 3)
    spread = intervals(hits=90, present=100, predicted=90, total=200)
    low, high = spread["recall"]
    assert 0.82 < low < 0.87  # exact binomial: 0.824-0.951
    assert 0.93 < high < 0.97
    assert intervals(100, 100, 110, 200)["recall"] == [1.0, 1.0]


def test_a_run_is_reproduced(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accel_ft import report
    from accel_ft.errors import UserError

    train.main(words)
    capsys.readouterr()
    train.main(["--reproduce", str(tmp_path / "run")])
    assert "reproduced: 12 train events, bit for bit" in capsys.readouterr().out
    report.main(["--diff", str(tmp_path / "run"), str(tmp_path / "run_again")])
    assert capsys.readouterr().out == "they do not differ\n"
    with pytest.raises(UserError, match="not reproduced") as caught:
        train.main(
            [
                "--reproduce",
                str(tmp_path / "run"),
                "--learning_rate",
                "2e-3",
                "--output_dir",
                str(tmp_path / "third"),
            ]
        )
    assert "setting learning_rate: 0.001 | 0.002" in str(caught.value)
    assert "update 2: loss" in str(caught.value) or "update 2: learning_rate" in str(caught.value)


def test_a_reproduction_says_where_it_differs_and_why(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    """Of a run that was stopped, that logged now and then, and whose pretrained weights are others now."""
    from accel_ft.errors import UserError

    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_model, encoder)
    words += ["--model_name_or_path", str(encoder), "--logging_steps", "4"]
    with pytest.raises(RuntimeError):
        stopped_at(9, words)
    again = ["--reproduce", str(tmp_path / "run")]
    train.main(again)
    shown = capsys.readouterr().out
    assert "reproduced: 2 train events, bit for bit; " in shown
    assert "run stopped there, after update 8" in shown
    with pytest.raises(RuntimeError):
        stopped_at(2, [*words, "--output_dir", str(tmp_path / "short")])
    with pytest.raises(UserError, match="nothing to compare"):
        train.main(["--reproduce", str(tmp_path / "short")])
    weights = load_file(encoder / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, encoder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        train.main([*again, "--output_dir", str(tmp_path / "third")])
    assert "receipt pretrained.model.safetensors: " in str(caught.value)
    assert "updates 1 to 4: loss: " in str(caught.value)


def test_the_receipt_and_what_differs_in_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.reporting.compare import differences
    from accel_ft.reporting.record import read_record
    from accel_ft.runtime import receipt

    train.main([*words, "--max_steps", "1"])
    monkeypatch.setattr(receipt, "_version", lambda package: f"9.9 of {package}")
    other = write_rows(tmp_path / "other.csv", 40, seed=9)
    more = ["--max_steps", "1", "--train_file", str(other), "--output_dir", str(tmp_path / "b")]
    train.main([*words, *more])
    one, two = (read_record(tmp_path / name) for name in ("run", "b"))
    told = {what for what, _, _ in differences(one, two)}
    assert {"receipt data.train", "receipt versions.torch", "receipt num_samples.train"} <= told
    assert {"git_commit", "python", "versions", "machine", "tokenizer", "pretrained"} <= set(
        one.receipt
    )
    assert one.receipt["machine"]["device"]
    assert one.receipt["machine"]["threads"] == 1
    assert len(one.receipt["pretrained"]["model.safetensors"]) == 64


# What a user may do in between


def test_a_model_folder_that_is_no_runs(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "run/model")
    (tmp_path / "run/model/NOTES.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds a `model` that is no run's"):
        train.main(words)
    assert (tmp_path / "run/model/NOTES.txt").read_text() == "mine"


def rates(folder: Path) -> list[float]:
    return [e["learning_rate"] for e in events_of(folder) if e["event"] == "train"]


def test_changed_rates_and_more_epochs_hold_from_the_resume_on(
    words: list[str], tmp_path: Path
) -> None:
    settings = {
        "faster": ["--learning_rate", "0.5", "--weight_decay", "0.25"],
        "longer": ["--num_train_epochs", "4", "--warmup_steps", "0.1"],
    }
    allow = ["--allow_changed", "learning_rate", "weight_decay", "warmup_steps"]
    train.main(words)
    for name, changed in settings.items():
        train.main([*words, *changed, "--output_dir", str(tmp_path / name)])
        whole = rates(tmp_path / name)
        shutil.copytree(tmp_path / "run", tmp_path / f"{name}_later")
        cut_off(tmp_path / f"{name}_later", 6)
        later = [*words, *changed, *LATEST, *allow, "--output_dir", str(tmp_path / f"{name}_later")]
        train.main(later)
        found = rates(tmp_path / f"{name}_later")
        assert found[:6] == rates(tmp_path / "run")[:6]
        assert found[6:] == whole[6:]
        newest = max((tmp_path / f"{name}_later/checkpoints").iterdir())
        groups = torch.load(newest / "optimizer.bin", weights_only=True)["param_groups"]
        assert {group["weight_decay"] for group in groups} == {
            0.0,
            0.25 if name == "faster" else 0.01,
        }


def test_a_model_that_left_its_run_is_measured_as_in_it(
    words: list[str], tmp_path: Path, odd_file: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Cut at the same length; and from inside its own folder."""
    from accel_ft import evaluate, export, load_classifier

    train.main([*words, "--max_seq_length", "9"])
    test = next(e for e in events_of(tmp_path / "run") if e["event"] == "test")
    out = tmp_path / "exported"
    export.main(["--checkpoint", str(tmp_path / "run"), "--output", str(out)])
    assert load_classifier(out).max_seq_length == 9
    monkeypatch.chdir(tmp_path / "run/model")
    for words in (["--checkpoint", str(out), "--test_file", str(odd_file)], ["--checkpoint", "."]):
        capsys.readouterr()
        evaluate.main(words)
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(
            test["test_loss"], rel=1e-7
        )


def test_rows_that_change_beside_a_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """While it trains: no texts that are not its own. Between two starts: best starts anew. After it: it is told."""
    from accel_ft import evaluate
    from accel_ft.engine.run import Run
    from accel_ft.reporting.record import read_record

    rows, held_out = (write_rows(tmp_path / f"{n}.csv", n, seed=n) for n in (40, 30))
    words = [*words[:2], *words[8:], "--train_file", str(rows), "--load_best_model_at_end"]
    finish = Run.finish

    def change(run: Run) -> None:
        write_rows(rows, 60, seed=3)
        finish(run)

    with monkeypatch.context() as patch, caplog.at_level("WARNING", logger="accel_ft"):
        patch.setattr(Run, "finish", change)
        patch.setattr("accel_ft.runtime.logging.setup_logging", lambda rank: None)
        train.main(words)
        assert "has changed since it was read: no mistakes.jsonl" in caplog.text
        assert (tmp_path / "run/model/README.md").is_file()
        assert not (tmp_path / "run/mistakes.jsonl").exists()
        assert read_record(tmp_path / "run").mistakes == []
        evaluate.main(["--checkpoint", str(tmp_path / "run")])
        assert "some may have been trained on" in caplog.text
        caplog.clear()
        write_rows(rows, 40, seed=40)
        for more in ([], ["--max_eval_samples", "2"]):
            evaluate.main(["--checkpoint", str(tmp_path / "run"), *more])
            assert "trained on" not in caplog.text
        words += ["--output_dir", str(tmp_path / "b"), "--validation_file"]
        with pytest.raises(RuntimeError):
            stopped_at(8, [*words, str(held_out)])
        train.main([*words, str(rows), *LATEST])
        assert "best was that on other validation rows: best starts anew" in caplog.text


def test_a_full_disk_is_met_before_the_old_model_goes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.engine import build

    train.main(words)
    full = type("Usage", (), {"free": 0})
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _: full)
    with pytest.raises(CheckpointError, match="0 MB are free"):
        train.main([*words, "--num_train_epochs", "4", *LATEST])
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert events_of(tmp_path / "run")[-1]["event"] == "end"


@pytest.mark.parametrize("where", ["model_config", "rows"])
def test_ctrl_c_with_nothing_to_save_can_be_caught(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, which goes on; the same settings then train. Who catches all that goes wrong with other
    people's files does not catch it.
    """  # fmt: skip
    import os
    import signal

    import transformers

    from accel_ft.engine import build
    from accel_ft.errors import Preempted

    def interrupted(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("it has gone on")

    with monkeypatch.context() as patch:
        if where == "rows":
            patch.setattr(build, "load_splits", interrupted)
        else:
            patch.setattr(transformers.AutoConfig, "from_pretrained", interrupted)
        with pytest.raises(Preempted, match="SIGINT at stage .*: stopped, there was nothing"):
            train.main(words)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train.main([*words, "--max_steps", "1"])


def test_a_global_batch_larger_than_the_rows_costs_nothing(
    words: list[str], tmp_path: Path
) -> None:
    train.main([*words, "--global_batch_size", "1000000", "--max_steps", "1"])
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert receipt["accumulation_steps"] == 12  # 47 rows, 4 at once


def test_what_predict_is_given(words: list[str], tmp_path: Path, capsys) -> None:
    from accel_ft import load_classifier, predict
    from accel_ft.errors import DataError

    train.main([*words, "--max_steps", "1"])
    classifier = load_classifier(tmp_path / "run")
    texts = ["a goal", "the bank"]
    plain = classifier.predict(texts)
    assert classifier.predict(np.array(texts, dtype=object)) == plain
    for bad, words in (
        (["a", None], r"texts\[1\]: is None, not a text"),
        (["a", ("a", "b")], r"texts\[1\]: is \('a', 'b'\), not a text"),
        ([("a", "b"), "a"], r"texts\[1\]: is 'a', not a pair"),
    ):
        with pytest.raises(DataError, match=words):
            classifier.predict(bad)
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"text": "a"}\n[1]\n')
    out.write_text("of yesterday")
    command = ["--checkpoint", str(tmp_path / "run"), "--output", str(out), "--input"]
    with pytest.raises(DataError, match="line 2: is"):
        predict.main([*command, str(rows)])
    assert out.read_text() == "of yesterday"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "in.jsonl", "out.jsonl"}
    out.chmod(0o600)
    rows.write_text('{"text": "a"}\n')
    predict.main([*command, str(rows)])
    assert json.loads(out.read_text())["line"] == 1
    assert out.stat().st_mode & 0o777 == 0o600
    rows.rename(tmp_path / "in.ndjson")
    with pytest.raises(ConfigError, match=r"in.ndjson: unknown format. Fix: --input_format"):
        predict.main([*command, str(tmp_path / "in.ndjson")])


def test_a_model_of_the_hub(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    """From the Hub's cache, as it lies there after a download."""
    from huggingface_hub import constants

    commit, place = "0123456789" * 4, Path(constants.HF_HUB_CACHE) / "models--some--model"
    shutil.copytree(tiny_model, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    train.main([*words, "--model_name_or_path", "some/model", "--max_steps", "1"])
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert receipt["pretrained"] == {"commit": commit}
    assert "base_model: some/model" in (tmp_path / "run/model/README.md").read_text()


def test_folders_that_are_nearly_checkpoints(words: list[str], tmp_path: Path) -> None:
    from accel_ft import predict

    train.main([*words, "--max_steps", "1"])
    for folder in (tmp_path, tmp_path / "run/checkpoints"):
        with pytest.raises(CheckpointError, match="holds no model. Fix: the folder of a run"):
            predict.main(["--checkpoint", str(folder), "--text", "a"])
    again = [*words, "--output_dir", str(tmp_path / "b")]
    with pytest.raises(CheckpointError, match="is a run. Fix: `latest`"):
        train.main([*again, "--resume_from_checkpoint", str(tmp_path / "run")])


# The Hub


class Hub:
    """A stand-in for the Hub: keeps what is committed."""

    def __init__(self) -> None:
        import http.server
        import threading

        self.files: dict[str, bytes] = {}
        self.repos: list[dict] = []
        self.refuses = False
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if hub.refuses:
                    self.send_error(404, "Not Found")
                    return
                self.answer(
                    {
                        "type": "user",
                        "name": "me",
                        "auth": {"type": "access_token", "accessToken": {"role": "write"}},
                    }
                )

            do_HEAD = do_GET  # noqa: N815

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hub.refuses:
                    self.send_error(403, "Forbidden")
                elif self.path.endswith("/api/repos/create"):
                    hub.repos.append(json.loads(body))
                    self.answer({"url": f"{hub.url}/me/{json.loads(body)['name']}", "id": "me/x"})
                elif "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    self.answer(
                        {
                            "files": [
                                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                                for f in files
                            ]
                        }
                    )
                elif "/commit/" in self.path:
                    import base64

                    for line in body.splitlines():
                        item = json.loads(line)
                        if item["key"] == "file":
                            hub.files[item["value"]["path"]] = base64.b64decode(
                                item["value"]["content"]
                            )
                    self.answer(
                        {"commitUrl": f"{hub.url}/me/x/commit/1", "commitOid": "1", "success": True}
                    )
                else:
                    self.answer({})

            def answer(self, what: dict) -> None:
                text = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    from accel_ft.runtime import card

    hub = Hub()
    # Only the address differs from the real calls.
    monkeypatch.setattr(
        card, "HfApi", lambda: __import__("huggingface_hub").HfApi(endpoint=hub.url, token="hf_x")
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_push_to_hub(
    words: list[str], tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole model goes up, with a card that has the results; from the end of a run and from export."""
    from huggingface_hub import ModelCard

    from accel_ft import export

    train.main([*words, "--push_to_hub", "--hub_model_id", "me/x", "--hub_private_repo"])
    assert hub.repos[0]["visibility"] == "private"
    model = tmp_path / "run/model"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert "model.safetensors" in hub.files
    card = ModelCard(hub.files["README.md"].decode())
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert results["accuracy"] == pytest.approx(
        events_of(tmp_path / "run")[-2]["test_accuracy"], abs=1e-6
    )
    assert {"accuracy", "f1_macro", "matthews_correlation", "loss"} == set(results)
    card.data.validate() if hasattr(card.data, "validate") else None
    hub.files.clear()
    export.main(
        [
            "--checkpoint",
            str(tmp_path / "run"),
            "--output",
            str(tmp_path / "out"),
            "--push_to_hub",
            "--hub_model_id",
            "me/x",
        ]
    )
    assert "model.safetensors" in hub.files
    exported = ModelCard(hub.files["README.md"].decode())
    assert exported.data.eval_results == card.data.eval_results
    assert {result.dataset_split for result in exported.data.eval_results} == {"test"}
    for text in (card.content, exported.content):
        assert 'pipeline("text-classification", model="me/x")' in text


def test_a_hub_that_refuses_is_met_before_the_training(
    words: list[str], tmp_path: Path, hub: Hub
) -> None:
    hub.refuses = True
    with pytest.raises(
        ConfigError, match="hub_model_id=me/x: the Hub refuses: .*403.*Fix: `hf auth login`"
    ):
        train.main([*words, "--push_to_hub", "--hub_model_id", "me/x"])
    assert not (tmp_path / "run/checkpoints").exists()


# From Python


def test_fit_and_load_classifier(tmp_path: Path, tiny_model: Path, rows_file: Path) -> None:
    from accel_ft import fit, load_classifier

    model = fit(
        model_name_or_path=str(tiny_model), train_file=rows_file, output_dir=tmp_path / "run",
        num_train_epochs=30, learning_rate=5e-3, max_seq_length=32, save_steps=1000,
        global_batch_size=8,
    )  # fmt: skip
    found = load_classifier(model).predict(["goal striker league coach", "bank profit shares"])
    assert [each["label"] for each in found] == ["Sports", "Business"]
    assert load_classifier(model).predict([]) == []
    with pytest.raises(
        ConfigError, match="learning_rat: unknown key. Did you mean `learning_rate`"
    ):
        fit(learning_rat=1)


def test_label_smoothing_and_how_adapters_are_scaled(words: list[str], tmp_path: Path) -> None:
    """The keys reach the loss and peft."""
    words += ["--max_steps", "4"]
    losses = []
    for name, more in {
        "plain": [],
        "smooth": ["--label_smoothing_factor", "0.5"],
        "lora": LORA,
        "scaled": [*LORA, "--lora_alpha", "64"],
        "dropped": [*LORA, "--lora_dropout", "0.5"],
    }.items():
        train.main([*words, *more, "--output_dir", str(tmp_path / name)])
        losses.append([e["loss"] for e in events_of(tmp_path / name) if e["event"] == "train"])
    assert len({tuple(each) for each in losses}) == 5


@pytest.mark.parametrize("extra", ["lora", "onnx", "report", "search", "trackio"])
def test_a_missing_extra_is_named(
    extra: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is asked for, before anything is loaded or written."""
    from conftest import ROOT

    from accel_ft import export, search
    from accel_ft.model import adapters, onnx
    from accel_ft.reporting import report
    from accel_ft.runtime import trackers

    for module in (adapters, onnx, report):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    words += ["--model_name_or_path", "no/model"]
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    files = ["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "job.yaml")]
    out = ["--checkpoint", "no/model", "--output", str(tmp_path / "out")]
    calls = {
        "lora": lambda: train.main([*words, *LORA]),
        "onnx": lambda: export.main([*out, "--format", "onnx"]),
        "report": lambda: report.write_report([], tmp_path),
        "search": lambda: search.main(files),
        "trackio": lambda: train.main([*words, "--report_to", "trackio"]),
    }
    with pytest.raises(ConfigError, match=rf"pip install 'accel_ft\[{extra}\]'"):
        calls[extra]()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]


# Fitting


def test_the_largest_micro_batch_that_fits(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less memory, smaller micro-batches, more of them: the same global batch and the same curve."""
    from accel_ft.engine import fitting

    train.main([*words, "--per_device_train_batch_size", "8"])
    losses = [e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    words += ["--per_device_train_batch_size", "auto"]
    measured = []

    def keep(*args, measure=fitting.measured_need):
        measured.append(measure(*args))
        return measured[-1]

    monkeypatch.setattr(fitting, "measured_need", keep)
    train.main([*words, "--output_dir", str(tmp_path / "much")])
    three_rows = measured[0].on_rank("none", 1, 0) + 3 * measured[0].per_row
    three_rows = int(three_rows / (1 - fitting.RESERVE)) + 1000
    monkeypatch.setattr(fitting, "device_bytes", lambda _: three_rows)
    train.main([*words, "--output_dir", str(tmp_path / "little")])
    steps = [
        json.loads((tmp_path / name / "receipt.json").read_text())["accumulation_steps"]
        for name in ("much", "little")
    ]
    assert steps == [1, 3]
    again = [e["loss"] for e in events_of(tmp_path / "little") if e["event"] == "train"]
    assert again[0] == pytest.approx(losses[0], rel=0.2)  # other dropout
    whole = run_hash(tmp_path / "little")
    cut_off(tmp_path / "little", 6)
    monkeypatch.setattr(fitting, "device_bytes", lambda _: 10 * three_rows)  # now more would fit
    train.main([*words, "--output_dir", str(tmp_path / "little"), *LATEST])
    assert run_hash(tmp_path / "little") == whole
    monkeypatch.setattr(fitting, "device_bytes", lambda _: 200_000)  # the model's states have none
    with pytest.raises(
        ConfigError, match="per_device_train_batch_size=auto: not one sample of 32 tokens fits"
    ):
        train.main([*words, "--output_dir", str(tmp_path / "none")])
    with pytest.raises(
        ConfigError, match="auto: given together with gradient_accumulation_steps=2"
    ):
        train.main([*words, "--global_batch_size", "none", "--gradient_accumulation_steps", "2"])


# Hand-over


def test_onnx(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file takes any number of rows and tokens, and says what the model says."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from accel_ft import export, load_classifier

    train.main(words)
    export.main(
        [
            "--checkpoint",
            str(tmp_path / "run"),
            "--output",
            str(tmp_path / "out"),
            "--format",
            "onnx",
        ]
    )
    assert "within" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    classify = load_classifier(tmp_path / "out", all_scores=True)
    text = "goal striker the of bank"
    inputs = classify.classifier.tokenizer([text], return_tensors="np")
    names = {each.name for each in session.get_inputs()}
    (logits,) = session.run(["logits"], {k: v for k, v in inputs.items() if k in names})
    chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert chances.tolist() == pytest.approx(
        list(classify.predict([text])[0]["scores"].values()), abs=1e-4
    )


# Search


def test_search(tiny_model: Path, rows_file: Path, odd_file: Path, tmp_path: Path) -> None:
    """Trials run, bad ones are stopped, the study goes on where it was, and ends in a job."""
    pytest.importorskip("optuna")
    import yaml
    from conftest import run

    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    settings = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    settings |= {"eval_steps": 3, "save_total_limit": None, "save_steps": 100}
    settings["push_to_hub"] = True  # of the best one, later: no trial asks for the Hub
    settings = {k: int(v) if str(v).isdigit() else v for k, v in settings.items()} | {
        "learning_rate": 1e-3
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "space.yaml").write_text(
        "learning_rate: [1.0e-9, 5.0e-3]\nwarmup_steps: {low: 0, high: 2}\n"
    )
    command = [
        "python",
        "-m",
        "accel_ft.search",
        "--job",
        tmp_path / "job.yaml",
        "--space",
        tmp_path / "space.yaml",
    ]
    command += ["--output_dir", tmp_path / "search", "--config_file", "accelerate_configs/cpu.yaml"]
    run(*command, "--num_trials", "1")
    done = run(*command, "--num_trials", "3", "--num_startup_trials", "1", "--parallel_trials", "2")
    best = yaml.safe_load((tmp_path / "search/best.yaml").read_text())
    assert best["learning_rate"] in (1e-9, 5e-3)
    assert best["output_dir"] == str(tmp_path / "search/best")
    assert best["train_file"] == str(rows_file)
    assert done.stdout.count("trial_") == 2  # the first one is remembered
    import optuna

    study = optuna.load_study(
        study_name="accuracy", storage=f"sqlite:///{tmp_path / 'search/study.db'}"
    )
    assert len(study.trials) == 3
    assert best["push_to_hub"] is True
    train.main(["--config", str(tmp_path / "search/best.yaml"), "--push_to_hub", "false"])


STAND_IN = """
import json, sys, time
keys = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
events = open(keys["output_dir"] + "/metrics.jsonl", "w", buffering=1)
rate = float(keys["learning_rate"])
for step in range(1, 9):
    score = rate - step / 1000
    events.write(json.dumps({"event": "eval", "step": step, "eval_accuracy": score}) + "\\n")
    time.sleep(0 if rate > 0.5 else 0.3)
events.write(json.dumps({"event": "end", "step": 8, "eval_accuracy": score}) + "\\n")
"""


@pytest.fixture
def search_of_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Search over stand-ins for runs, whose accuracy is their learning rate, and falls."""
    optuna = pytest.importorskip("optuna")
    from accel_ft import search

    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    space, folder = tmp_path / "space.yaml", tmp_path / "search"
    popen = subprocess.Popen
    monkeypatch.setattr(
        search.subprocess,
        "Popen",
        lambda command, **keys: popen(
            [sys.executable, str(tmp_path / "stand_in.py"), *command], **keys
        ),
    )

    def start(lines: str, *words: str):
        space.write_text(lines)
        places = ["--job", tmp_path / "job.yaml", "--space", space, "--output_dir", folder]
        search.main([*map(str, places), *words])
        return optuna.load_study(study_name="accuracy", storage=f"sqlite:///{folder / 'study.db'}")

    return start


def test_a_search_that_goes_on_tries_other_settings(search_of_stand_ins) -> None:
    space = "learning_rate: {low: 0.6, high: 0.9}\n"
    search_of_stand_ins(space, "--num_trials", "2")
    study = search_of_stand_ins(space, "--num_trials", "4")
    assert len({trial.params["learning_rate"] for trial in study.trials}) == 4
    value = study.best_params["learning_rate"] - 8 / 1000  # of its end, not of its best evaluation
    assert study.best_value == pytest.approx(value)


def test_a_search_stops_what_is_worse_than_the_median(search_of_stand_ins) -> None:
    space = "learning_rate: [0.1, 0.9]\n"
    words = ["--num_trials", "6", "--num_startup_trials", "1"]
    study = search_of_stand_ins(space, *words)
    states = [(trial.params["learning_rate"], trial.state.name) for trial in study.trials]
    good = states.index((0.9, "COMPLETE"))
    assert set(states[good + 1 :]) <= {(0.1, "PRUNED"), (0.9, "COMPLETE")}
    assert (0.1, "PRUNED") in states
    with pytest.raises(ConfigError, match="learning_rate had other choices in the trials of"):
        search_of_stand_ins("learning_rate: [0.1, 0.5, 0.9]\n", "--num_trials", "7")


def test_a_search_of_another_job(search_of_stand_ins, tmp_path: Path) -> None:
    space = (
        "weight_decay: {low: 0, high: 1}\nlearning_rate: [0.9]\nfreeze: [null]\nlora_r: [4]\n"
        "per_device_train_batch_size: {low: 8, high: 64}\n"
    )
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\n")  # not with lora_r, but varied
    study = search_of_stand_ins(space, "--num_trials", "1")
    found = study.trials[0].params
    assert 0 < found["weight_decay"] < 1  # numbers of the key's kind
    assert isinstance(found["per_device_train_batch_size"], int)
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\nddp_timeout: 9\n")
    search_of_stand_ins(space, "--num_trials", "1")
    (tmp_path / "job.yaml").write_text("seed: 1\nmax_steps: 7\n")
    with pytest.raises(ConfigError, match="max_steps was None in the trials of"):
        search_of_stand_ins(space, "--num_trials", "2")


def test_trials_at_the_same_time(search_of_stand_ins) -> None:
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    study = search_of_stand_ins("learning_rate: {low: 0.1, high: 0.4}\n", *words)
    first, second = study.trials
    assert max(first.datetime_start, second.datetime_start) < min(
        first.datetime_complete, second.datetime_complete
    )


def test_a_space_that_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from accel_ft import search

    (tmp_path / "job.yaml").write_text("seed: 1\n")
    (tmp_path / "space.yaml").write_text(
        "lr_scheduler_type: [linear, cosin]\nsave_total_limit: {low: 0, high: 3}\n"
        "learning_rat: [1]\nseed: {low: 1}\nwarmup_steps: 3\nweight_decay: {low: 0, high: 0.1, log: true}\n"
    )
    with pytest.raises(ConfigError) as caught:
        search.main(["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "space.yaml")])
    assert "learning_rat: cannot be varied. Did you mean `learning_rate`?" in str(caught.value)
    assert "seed={'low': 1}: no range" in str(caught.value)
    assert "lr_scheduler_type=cosin" in str(caught.value)
    assert "save_total_limit=0" in str(caught.value)
    assert "warmup_steps=3: no range" in str(caught.value)
    assert "weight_decay={'low': 0, 'high': 0.1, 'log': True}: no range" in str(caught.value)


def test_card_and_report_of_a_run_killed_before_them(words: list[str], tmp_path: Path) -> None:
    """What the end still lacks is written by the next start, which trains nothing."""
    words += ["--max_steps", "2", "--report_to", "html"]
    train.main(words)
    run = tmp_path / "run"
    card = (run / "model/README.md").read_bytes()
    (run / "model/README.md").unlink(), (run / "report.html").unlink()
    events = (run / "metrics.jsonl").read_bytes()
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert (run / "model/README.md").read_bytes() == card
    assert (run / "report.html").is_file()
    assert (run / "metrics.jsonl").read_bytes() == events


def test_mistakes_may_hold_any_line_break(words: list[str], tmp_path: Path) -> None:
    from accel_ft.reporting.record import read_record

    train.main([*words, "--max_steps", "1"])
    file = tmp_path / "run/mistakes.jsonl"
    first = json.loads(file.read_text().split("\n")[0]) | {"text": "one\u2028two\x85three"}
    file.write_text(json.dumps(first, ensure_ascii=False) + "\n")
    assert read_record(tmp_path / "run").mistakes == [first]
    (tmp_path / "run/config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "run")


def test_a_model_too_large_to_be_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.engine import fitting

    monkeypatch.setattr(fitting, "device_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="auto: the whole model, 0 MiB, has no room"):
        train.main([*words, "--per_device_train_batch_size", "auto"])


def test_a_head_keeps_its_labels(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier trained on: where its labels are those of the rows, in its own order; else under new names."""
    from transformers import AutoModelForSequenceClassification

    train.main([*words, "--max_steps", "1"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    order = ["Sports", "Business", "World", "Sci/Tech"]
    for names in (order, ["a", "b", "c", "d"]):
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
        model.save_pretrained(tmp_path / names[0])
        for file in (tmp_path / "run/model").glob("*token*"):
            (tmp_path / names[0] / file.name).write_bytes(file.read_bytes())
        words[1], words[words.index("--output_dir") + 1] = (
            str(tmp_path / names[0]),
            str(tmp_path / f"{names[0]}_run"),
        )
        train.main([*words, "--max_steps", "1"])
    receipts = [
        json.loads((tmp_path / f"{name}_run/receipt.json").read_text()) for name in ("Sports", "a")
    ]
    assert receipts[0]["identity"]["labels"] == order
    assert receipts[1]["identity"]["labels"] == sorted(order)
    assert (
        capsys.readouterr().err.count(
            "is kept, though it was trained for other labels: a -> Business, b -> Sci/Tech"
        )
        == 1
    )


def test_folders_without_a_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--reproduce .` and `--output .` mean the folder one is in."""
    from accel_ft import export

    train.main([*words, "--max_steps", "2"])
    monkeypatch.chdir(tmp_path / "run")
    train.main(["--reproduce", "."])
    assert (tmp_path / "run_again/model").is_dir()
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    export.main(["--checkpoint", "../run", "--output", "."])
    assert (tmp_path / "new/model.safetensors").is_file()


def test_export_of_a_sharded_classifier(words: list[str], tmp_path: Path) -> None:
    """As large ones lie on the Hub: in several files."""
    from transformers import AutoModelForSequenceClassification

    from accel_ft import export

    train.main([*words, "--max_steps", "1"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    for file in (tmp_path / "run/model").glob("*token*"):
        (tmp_path / "large").mkdir(exist_ok=True)
        (tmp_path / "large" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(tmp_path / "large", max_shard_size="20KB")
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 1
    export.main(["--checkpoint", str(tmp_path / "large"), "--output", str(tmp_path / "out")])
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())

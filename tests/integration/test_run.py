"""A whole run in this process: train, resume, finish, evaluate, predict."""

import csv
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from conftest import LATEST, cut_off, events_of, job_words, run_hash, stopped_at
from safetensors.torch import load_file, save_file

from accel_ft import evaluate, export, predict, train
from accel_ft.checkpoint import state, transaction
from accel_ft.config import TrainConfig
from accel_ft.engine import start
from accel_ft.engine.build import build
from accel_ft.engine.run import Run
from accel_ft.errors import CheckpointError, ConfigError, DataError, UserError
from accel_ft.runtime.watch import Watch
from accel_ft.settings import parse, read_receipt


def end_of(run: Path) -> tuple[int, int]:
    """Return the last update of a finished run, and the update that model/ holds."""
    end = events_of(run)[-1]
    assert end["event"] == "end"
    return end["step"], end["model_step"]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows_file: Path, odd_file: Path
) -> Path:
    """Two epochs of 47 rows in global batches of 8 (6 updates each, the last with 7 rows); every update is saved."""
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train.main(job_words(tiny_model, rows_file, odd_file, run))
    return run


def job_of(finished: Path, folder: Path, *more: str) -> list[str]:
    """The finished run's job, into another folder."""
    return ["--config", str(finished / "config.yaml"), "--output_dir", str(folder), *more]


def test_all_of_a_data_set_that_was_held_back(
    finished: Path,
    rows_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its only split is called `train`: a part of it is measured by default, all of it if the split is named."""
    import datasets

    rows = datasets.Dataset.from_csv(str(rows_file), cache_dir=str(tmp_path / "cache"))
    rows.save_to_disk(tmp_path / "held")
    words = ["--checkpoint", str(finished), "--dataset_name", str(tmp_path / "held")]
    words += ["--train_file", "none", "--validation_file", "none", "--test_file", "none"]
    evaluate.main(words)
    told = capsys.readouterr()
    assert json.loads(told.out)["num_samples"] < len(rows)
    assert "part of its split train is measured. For all: --test_split_name train" in told.err
    evaluate.main([*words, "--test_split_name", "train"])
    assert json.loads(capsys.readouterr().out)["num_samples"] == len(rows)


def test_mistakes_are_rows_of_the_test_file(finished: Path, odd_file: Path) -> None:
    lines = (finished / "mistakes.jsonl").read_text().splitlines()
    rows = list(csv.DictReader(odd_file.read_text().splitlines()))
    assert lines
    for each in map(json.loads, lines):
        assert rows[each["row"]]["text"] == each["text"]
        assert rows[each["row"]]["label"] == each["label"]


def test_random_sampling_changes_the_order(finished: Path, tmp_path: Path) -> None:
    job = job_of(finished, tmp_path / "run")
    train.main([*job, "--train_sampling_strategy", "random", "--max_steps", "1"])
    one, other = (read_receipt(folder) for folder in (finished, tmp_path / "run"))
    assert one["sample_order_sha256"] != other["sample_order_sha256"]


def test_what_a_run_leaves(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "checkpoints", "config.yaml", "metrics.jsonl", "mistakes.jsonl", "model", "predictions.npz",
        "ranks", "receipt.json",
    }  # fmt: skip
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in range(1, 13)
    ]
    events = events_of(finished)
    assert [event["event"] for event in events].count("train") == 12
    assert [event["step"] for event in events if event["event"] == "eval"] == [6, 12]
    assert [event["event"] for event in events][-2:] == ["test", "end"]
    first = events[0]
    assert {
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "samples_per_second",
        "tokens_per_second",
    } <= set(first)
    assert first["learning_rate"] == 0.0  # warm-up starts at 0
    assert {"eval_loss", "eval_accuracy", "eval_f1_macro", "eval_per_class"} <= set(
        next(event for event in events if event["event"] == "eval")
    )
    receipt = json.loads((finished / "receipt.json").read_text())
    assert receipt["strategy"]["num_processes"] == 1
    assert len(receipt["sample_order_sha256"]) == 64
    assert receipt["num_samples"] == {"train": 47, "validation": 21, "test": 21}
    settings = yaml.safe_load((finished / "config.yaml").read_text())
    assert (settings["global_batch_size"], settings["gradient_accumulation_steps"]) == (8, None)


def test_a_run_learns(tmp_path: Path, still_model: Path, rows_file: Path) -> None:
    """A few words tell the class: the loss starts at ln(4) = 1.39, and the labels are learnt."""
    words = job_words(still_model, rows_file, rows_file, tmp_path / "run")
    train.main(
        [*words, "--num_train_epochs", "40", "--learning_rate", "5e-3", "--save_steps", "1000"]
    )
    events = events_of(tmp_path / "run")
    assert events[0]["loss"] == pytest.approx(1.386, abs=0.15)
    assert [event for event in events if event["event"] == "eval"][-1]["eval_accuracy"] == 1.0


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 0.1, 2.0]])
def test_an_update_is_the_mean_over_its_global_batch(
    tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path, weights: list[float] | None
) -> None:
    """Loss and gradient norm of a full batch and of the short last one equal plain PyTorch's on the whole batch."""
    from transformers import AutoModelForSequenceClassification

    from accel_ft.data.loader import collate
    from accel_ft.runtime.launch import make_accelerator

    words = job_words(still_model, rows_file, odd_file, tmp_path / "run")
    if weights is not None:
        words += ["--class_weights", ",".join(map(str, weights))]
    train.main(words)
    logged = {e["step"]: e for e in events_of(tmp_path / "run") if e["event"] == "train"}
    twin = build(parse(TrainConfig, words, "train"), make_accelerator(), Watch(tmp_path, 0, 1, 60))
    assert twin.num_parameters == sum(p.numel() for p in twin.model.parameters())  # all are trained
    assert twin.num_trained == twin.num_parameters
    for step, num_rows in ((5, 8), (6, 7)):
        before = tmp_path / "run" / "checkpoints" / f"step_{step - 1:08d}"
        model = AutoModelForSequenceClassification.from_pretrained(before).train()
        places = twin.plan.global_batch(step - 1)
        assert len(places) == num_rows
        batch = collate(twin.splits.train, places, twin.train_batches.pad)
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        weight = None if weights is None else torch.tensor(weights)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"], weight)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert logged[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert logged[step]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_its_config_reproduces_the_run(finished: Path, tmp_path: Path) -> None:
    train.main(job_of(finished, tmp_path / "again"))
    assert run_hash(tmp_path / "again") == run_hash(finished)


def test_a_resume_in_another_precision_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Precision is a flag of the launcher, and easily forgotten at a resume."""
    run = shutil.copytree(finished, tmp_path / "run")
    cut_off(run, 10)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    words = job_of(finished, run, *LATEST)
    try:
        AcceleratorState._reset_state()
        with pytest.raises(
            CheckpointError,
            match=r"mixed_precision: 'no' in the checkpoint, 'bf16' .*\(`accelerate launch --mixed_precision no`",
        ):
            train.main(words)
        train.main([*words, "--allow_changed", "mixed_precision"])
        assert events_of(run)[-1]["event"] == "end"
        shutil.rmtree(run / "model")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        AcceleratorState._reset_state()
        record = (run / "receipt.json").read_bytes()
        with pytest.raises(CheckpointError, match="'bf16' in the checkpoint, 'no' in this job"):
            train.main(words)  # even with no update left: the receipt would be wrong
        assert (run / "receipt.json").read_bytes() == record
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        AcceleratorState._reset_state()
        train.main(words)
        assert (run / "model/config.json").is_file()
    finally:
        AcceleratorState._reset_state()


@pytest.mark.parametrize(
    "gone", ["", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_lost_model_is_made_again(
    finished: Path, tmp_path: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """model/ or one of its files is missing: a resume restores the final model and its metrics."""
    run = shutil.copytree(finished, tmp_path / "run")
    transaction.remove(run / "model" / gone)
    words = job_of(finished, run, *LATEST)
    for _ in range(2):
        train.main(words)
        made = run_files(run / "model")
        assert made == run_files(finished / "model") | {"README.md": made["README.md"]}
        assert run_hash(run) == run_hash(finished)
    told = capsys.readouterr()
    assert told.err.count("is finished: its end is repeated: ") == 1
    assert told.out.count(f"model: {run}/model\n") == 2


@pytest.mark.parametrize("step", range(13))
def test_resume_is_bit_identical(finished: Path, tmp_path: Path, step: int) -> None:
    """Killed after any update, including the end of an epoch (6) and of the run (12): the disk holds the checkpoints
    up to that update, and a log that may be ahead of them.
    """
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("model"))
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name[-8:]) > step:
            shutil.rmtree(folder)
    last = 12 if step else 1  # step 0: killed while the first checkpoint was written
    ahead = [e for e in events_of(finished) if e["event"] != "end" and e["step"] <= last]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in ahead) + '{"event": "tra'
    )
    (run / "checkpoints" / ".staging-step_00000013").mkdir()
    train.main(job_of(finished, run, *LATEST))
    assert run_hash(run) == run_hash(finished)
    assert not list((run / "checkpoints").glob(".staging*"))


def test_a_finished_run_does_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def times() -> dict[Path, int]:
        files = [p for p in finished.rglob("*") if p.is_file() and p.parent.name != "ranks"]
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    train.main(["--config", str(finished / "config.yaml"), "--resume_from_checkpoint", "latest"])
    assert times() == before
    captured = capsys.readouterr()
    assert "is finished: nothing to do" in captured.err
    assert f"model: {finished / 'model'}" in captured.out


def test_a_finished_run_is_measured_on_other_rows(
    finished: Path, tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another test file, the end is repeated: the printed test metrics are those of the new rows."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = ["--config", str(run / "config.yaml"), "--output_dir", str(run)]
    train.main([*words, "--test_file", str(rows_file), *LATEST])
    told = capsys.readouterr()
    assert "its end is repeated" in told.err
    events = events_of(run)
    assert [e["event"] for e in events].count("test") == 1
    train_rows = evaluate_scores(run, rows_file)
    assert events[-2]["test_loss"] == pytest.approx(train_rows["loss"])
    assert f"test rows: {train_rows['accuracy']:.4f}" in told.out
    assert end_of(run) == (12, 12)
    assert load_file(run / "model/model.safetensors").keys()
    train.main([*words, "--test_file", str(rows_file), *LATEST])
    assert "is finished: nothing to do" in capsys.readouterr().err


def evaluate_scores(run: Path, rows_file: Path) -> dict[str, float]:
    scores = run.parent / "scores.json"
    evaluate.main(
        ["--checkpoint", str(run), "--test_file", str(rows_file), "--output", str(scores)]
    )
    found: dict[str, float] = json.loads(scores.read_text())
    return found


def test_a_kill_while_the_end_is_made_anew(
    finished: Path, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once model/ is removed, the run must not count as finished, or model/ would never be written again."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = job_of(finished, run, *LATEST, "--test_file", str(rows_file))
    with monkeypatch.context() as patch:
        patch.setattr(start.transaction, "remove", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train.main(words)
    train.main(words)
    assert end_of(run) == (12, 12)
    assert (run / "model/model.safetensors").is_file()


def killed(folder: Path) -> None:
    shutil.rmtree(folder)
    raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("more", "before", "words"),
    [
        (["--layerwise_lr_decay", "0.5"], [], "layerwise_lr_decay: None .*: cannot be allowed"),
        (
            ["--lora_r", "2"],
            ["--lora_r", "4"],
            "lora_r: 4 .*changes the parameters .*: cannot be allowed",
        ),
        (
            ["--freeze", "encoder"],
            [],
            "freeze: None .*changes the parameters .*: cannot be allowed",
        ),
    ],
)
def test_other_parameters_cannot_be_allowed(
    finished: Path, tmp_path: Path, more: list[str], before: list[str], words: str
) -> None:
    job = job_of(finished, tmp_path / "run")
    train.main([*job, *before, "--max_steps", "1"])
    allowed = ["--allow_changed", "layerwise_lr_decay"]
    with pytest.raises(CheckpointError, match=words):
        train.main([*job, *more, "--max_steps", "2", *LATEST, *allowed])


def test_validation_rows_that_were_trained_on_are_told(
    finished: Path, tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are split off the training file: once that has grown, other rows are split off, and a warning follows."""
    rows, run = tmp_path / "rows.csv", tmp_path / "run"
    shutil.copy(rows_file, rows)
    words = job_of(finished, run, "--validation_file", "none", "--train_file", str(rows))
    train.main([*words, "--max_steps", "2", "--max_train_samples", "30"])
    train.main([*words, "--max_steps", "3", *LATEST, "--allow_changed", "train_data"])
    assert "trained on" not in capsys.readouterr().err  # more of the same rows
    with rows.open("a") as file:
        file.write("one row more,World\n")
    train.main([*words, "--max_steps", "4", *LATEST, "--allow_changed", "train_data"])
    assert "it may have trained on some" in capsys.readouterr().err
    train.main([*words, "--max_steps", "5", *LATEST])  # and at every later start
    assert "it may have trained on some" in capsys.readouterr().err
    evaluate.main(["--checkpoint", str(run), "--split", "validation"])
    assert "it may have trained on some" in capsys.readouterr().err


def test_another_split_into_micro_batches_is_told(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = job_of(finished, tmp_path / "run")
    train.main([*words, "--max_steps", "2"])
    train.main([*words, "--max_steps", "3", *LATEST])
    assert "an update had" not in capsys.readouterr().err
    train.main([*words, "--max_steps", "4", "--per_device_train_batch_size", "8", *LATEST])
    assert "had 2 micro-batches per rank, now it has 1" in capsys.readouterr().err


def test_rows_whose_file_name_is_no_utf_8(finished: Path, rows_file: Path, tmp_path: Path) -> None:
    rows = tmp_path / os.fsdecode(b"caf\xe9.csv")
    shutil.copy(rows_file, rows)
    words = job_of(finished, tmp_path / "run")
    train.main([*words, "--train_file", str(rows), "--max_steps", "1", "--report_to", "html"])
    assert "udce9.csv" in (tmp_path / "run/model/README.md").read_text()
    export.main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "exported")])
    assert "udce9.csv" in (tmp_path / "exported/README.md").read_text()
    handler = signal.getsignal(signal.SIGTERM)
    with rows.open("a") as file:
        file.write("a,\n")
    with pytest.raises(DataError, match="caf.[.]csv: 1 faulty row"):
        train.main([*words, "--train_file", str(rows), "--output_dir", str(tmp_path / "other")])
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "udce9.csv: 1 faulty row" in (tmp_path / "other/ranks/rank_00000.log").read_text()
    assert (tmp_path / "run/report.html").is_file()


def test_a_run_ends_well_where_its_folder_cannot_be_printed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = job_of(finished, tmp_path / "\xf6")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    train.main([*words, "--max_steps", "1"])


def test_latest_with_no_checkpoint_starts(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = job_of(finished, tmp_path / "run")
    train.main([*words, "--resume_from_checkpoint", "latest", "--max_steps", "2"])
    assert "starting from the beginning" in capsys.readouterr().err
    assert end_of(tmp_path / "run") == (2, 2)


def test_latest_of_a_start_that_went_on_from_elsewhere_does_not_begin_anew(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed from another run's checkpoint and killed before its first save: `latest` must not start from update 0."""
    words = job_of(finished, tmp_path / "run")
    theirs = ["--resume_from_checkpoint", str(finished / "checkpoints/step_00000008")]

    def fail(_: Run) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", fail)
        with pytest.raises(RuntimeError, match="killed"):
            train.main([*words, *theirs])
    with pytest.raises(CheckpointError, match="had reached update 8, but its checkpoints are gone"):
        train.main([*words, *LATEST])
    other = [*words, "--learning_rate", "0.01"]
    with pytest.raises(CheckpointError, match="run: belongs to another job(.|\n)*learning_rate: 0"):
        train.main([*other, *theirs])  # the log would mix two jobs
    train.main([*words, *theirs])
    assert run_hash(tmp_path / "run")["optimizer"] == run_hash(finished)["optimizer"]


@pytest.mark.parametrize("last", ["train", "save", "preempted"])
def test_latest_where_the_checkpoints_were_taken_away(
    last: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a purge, or because their disk is not mounted: the run's log is not overwritten. If its first checkpoint was
    never published, because the machine went down, the run starts from the beginning.
    """
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    shutil.rmtree(run / "checkpoints")
    log = [event for event in events_of(run) if event["event"] in ("train", "save")]
    log = log[: [event["event"] for event in log].index("save") + (last != "preempted")]
    first = log[-1]["step"]
    log += [{"event": "preempted", "step": first}] * (last == "preempted")
    written = "".join(json.dumps(event) + "\n" for event in log)
    (run / "metrics.jsonl").write_text(written)
    words = [*job_of(finished, run), *LATEST]
    if last == "train":
        (run / "checkpoints" / f".sealed-0-step_{first:08d}").mkdir(parents=True)
        train.main([*words, "--max_steps", "2"])
        assert "starting from the beginning" in capsys.readouterr().err
        return
    (run / "checkpoints/.staging-removed-step_00000001").mkdir(parents=True)  # left by pruning
    with pytest.raises(
        CheckpointError, match=f"reached update {first}, but its checkpoints are gone.*not mounted"
    ):
        train.main(words)
    assert (run / "metrics.jsonl").read_text() == written


def test_an_older_checkpoint_has_no_evaluated_step(finished: Path, tmp_path: Path) -> None:
    told = state.read_trainer_state(finished / "checkpoints/step_00000012")
    assert told["evaluated_step"] == 12
    del told["evaluated_step"]
    (tmp_path / "trainer_state.json").write_text(json.dumps(told | {"step": 7}))
    assert state.read_trainer_state(tmp_path)["evaluated_step"] == 7
    (tmp_path / "trainer_state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no readable trainer_state.json"):
        state.read_trainer_state(tmp_path)


def test_a_finished_run_goes_on_when_given_more_epochs(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = job_of(finished, run)
    train.main([*words, "--max_steps", "2"])
    train.main([*words, "--max_steps", "4", "--resume_from_checkpoint", "latest"])
    events = events_of(run)
    assert [e["step"] for e in events if e["event"] == "train"] == [1, 2, 3, 4]
    assert end_of(run) == (4, 4)


@pytest.mark.parametrize("fewer", [["--num_train_epochs", "1"], ["--max_steps", "6"]])
def test_a_resume_with_fewer_updates_is_told(
    fewer: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    cut_off(run, 4)
    told = (
        "warning: the run was to have 12 updates, now it has 6, and its learning rate follows the "
        "shorter schedule. Fix, if not meant: num_train_epochs, max_steps, rows and batch"
    )
    for each in (fewer, []):  # and the other way round
        train.main([*job_of(finished, run), *LATEST, *each])
        assert (told in capsys.readouterr().err) is bool(each)
    assert end_of(run) == (12, 12)


def test_a_run_that_goes_on_has_no_final_model(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model/ of its earlier end is removed: until it ends again, predictions come from the newest checkpoint."""
    from accel_ft.checkpoint.open import model_folder
    from accel_ft.engine import loop

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = job_of(finished, run, "--num_train_epochs", "3")
    monkeypatch.setattr(loop, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train.main([*words, "--resume_from_checkpoint", "latest"])
    assert model_folder(str(run)) == str(run / "checkpoints" / "step_00000012")


def test_a_folder_with_a_run_is_not_overwritten(finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match="already holds a run. Fix: --resume_from_checkpoint latest"
    ):
        train.main(["--config", str(finished / "config.yaml")])
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_finished_model_is_not_replaced(finished: Path, tmp_path: Path) -> None:
    """Even if its checkpoints and log were removed to save space."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    before = run_files(run)
    with pytest.raises(ConfigError, match="already holds a run"):
        train.main(job_of(finished, run))
    assert run_files(run) == before


def test_a_finished_run_is_not_taken_for_another(finished: Path) -> None:
    """Changed settings on a finished folder are an error: the old result is not passed off as theirs."""
    words = ["--config", str(finished / "config.yaml"), "--resume_from_checkpoint", "latest"]
    with pytest.raises(
        CheckpointError, match="learning_rate: 0.001 in the checkpoint, 0.01 in this job"
    ):
        train.main([*words, "--learning_rate", "0.01"])
    with pytest.raises(CheckpointError, match="global_batch_size: 8 in the checkpoint, 16 in this"):
        # Fewer updates than are done; the message names the setting that changed.
        train.main([*words, "--global_batch_size", "16"])


def test_going_back_does_not_orphan_later_checkpoints(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    words = job_of(finished, tmp_path / "run")
    third = str(tmp_path / "run" / "checkpoints" / "step_00000003")
    with pytest.raises(
        CheckpointError,
        match="holds later checkpoints, up to step_00000012. Fix: another output_dir",
    ):
        train.main([*words, "--resume_from_checkpoint", third])
    assert len(events_of(tmp_path / "run")) == len(events_of(finished))
    elsewhere = [*words[:-1], str(tmp_path / "branch"), "--resume_from_checkpoint", third]
    train.main(elsewhere)
    assert run_hash(tmp_path / "branch")["model"] == run_hash(finished)["model"]


def test_a_copy_beside_the_others_is_no_checkpoint_of_the_run(
    finished: Path, tmp_path: Path
) -> None:
    """A resume from the copy saves a real checkpoint at once: if a signal comes, that update counts as saved."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    cut_off(run, 8)
    for _, path in transaction.list_published(run / "checkpoints")[:-1]:
        shutil.rmtree(path)
    copy = run / "checkpoints/copy_of_8"
    (run / "checkpoints/step_00000008").rename(copy)
    words = job_of(finished, run)
    with pytest.raises(RuntimeError, match="stopped"):
        stopped_at(9, [*words, "--resume_from_checkpoint", str(copy)])
    assert [step for step, _ in transaction.list_published(run / "checkpoints")] == [8, 9]


def test_damaged_ones_do_not_outlive_the_sound(finished: Path, tmp_path: Path) -> None:
    """Checkpoints 11 and 12 are damaged: the run resumes from 10, and keeps the two that it has saved itself."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").unlink()
    for step in (11, 12):
        (run / "checkpoints" / f"step_{step:08d}" / "optimizer.bin").unlink()
    words = job_of(finished, run, "--save_total_limit", "2")
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "damaged-step_00000011",
        "damaged-step_00000012",
        "step_00000011",
        "step_00000012",
    ]
    assert run_hash(run)["optimizer"] == run_hash(finished)["optimizer"]


def test_a_checkpoint_with_a_note_in_it_is_not_thrown_away(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    cut_off(run, 8)
    (run / "checkpoints/step_00000008/NOTES.txt").write_text("mine")
    words = job_of(finished, run, *LATEST)
    train.main(words)
    assert "NOTES.txt is not in manifest.json" in capsys.readouterr().err
    assert (run / "checkpoints/damaged-step_00000008/NOTES.txt").read_text() == "mine"
    assert run_hash(run)["optimizer"] == run_hash(finished)["optimizer"]


def test_a_finished_run_without_checkpoints_is_not_trained_over(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("checkpoints"))
    words = job_of(finished, run, *LATEST)
    before = run_files(run)
    with pytest.raises(CheckpointError, match="its checkpoints are gone: it cannot resume"):
        train.main([*words, "--num_train_epochs", "3"])
    assert run_files(run) == before


def run_files(run: Path) -> dict[str, bytes]:
    files = (path for path in run.rglob("*") if path.is_file() and "ranks" not in path.parts)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_another_runs_checkpoint_does_not_replace_a_run(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = job_of(finished, run)
    train.main([*words, "--seed", "7", "--max_steps", "2", "--save_steps", "2"])
    before = run_files(run)
    theirs = ["--resume_from_checkpoint", str(finished / "checkpoints/step_00000008")]
    with pytest.raises(CheckpointError, match="belongs to another job(.|\n)*seed: 7"):
        train.main([*words, *theirs])
    assert run_files(run) == before


def test_a_start_that_fails_leaves_the_model(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.runtime.trackers import Trackers

    def refuse(*_: object) -> None:
        raise ConfigError("no login")

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = run_files(run)
    monkeypatch.setattr(Trackers, "start", refuse)
    words = job_of(finished, run, *LATEST)
    with pytest.raises(ConfigError, match="no login"):
        train.main([*words, "--num_train_epochs", "3"])
    assert run_files(run) == before


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_file_of_the_users_is_not_replaced(finished: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}\n")
    words = job_of(finished, tmp_path / "run")
    with pytest.raises(ConfigError, match=f"holds a `{name}` but no receipt.json"):
        train.main([*words, *LATEST])
    assert (tmp_path / "run" / name).read_text() == "{}\n"


def test_damaged_checkpoint(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`latest` skips a damaged checkpoint, and the run still ends bit-identical; given by its path, it is refused."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").unlink()
    file = run / "checkpoints" / "step_00000012" / "optimizer.bin"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    words = job_of(finished, run, "--resume_from_checkpoint")
    with pytest.raises(CheckpointError, match="optimizer.bin is damaged"):
        train.main([*words, str(file.parent)])
    train.main([*words, "latest"])
    shown = capsys.readouterr().err
    assert "not usable:" in shown
    assert "optimizer.bin is damaged" in shown
    assert "resumed from" in shown
    assert run_hash(run)["optimizer"] == run_hash(finished)["optimizer"]


def test_best_model_is_kept_and_taken(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated after each update, with save_total_limit 2, the best checkpoint survives and becomes the model."""
    run = tmp_path / "run"
    words = job_of(finished, run, "--learning_rate", "0.02")
    train.main([
        *words, "--load_best_model_at_end", "--eval_steps", "1", "--save_steps", "5", "--save_total_limit", "2",
        "--metric_for_best_model", "loss",
    ])  # fmt: skip
    said = capsys.readouterr().out
    losses = {e["step"]: e["eval_loss"] for e in events_of(run) if e["event"] == "eval"}
    best = min(losses, key=lambda step: (losses[step], step))
    kept = [path.name for path in (run / "checkpoints").iterdir()]
    assert f"step_{best:08d}" in kept
    assert len(kept) <= 3
    accuracy = {e["step"]: e["eval_accuracy"] for e in events_of(run) if e["event"] == "eval"}[best]
    assert f"accuracy on the validation rows: {accuracy:.4f}\n" in said
    ours = load_file(run / "model" / "model.safetensors")
    theirs = load_file(run / "checkpoints" / f"step_{best:08d}" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_whose_best_checkpoint_is_damaged_ends_with_the_last_model_if_told_so(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = job_of(finished, run, "--learning_rate", "0.5")
    words += ["--load_best_model_at_end", "--eval_steps", "1", "--metric_for_best_model", "loss"]
    train.main(words)
    best = events_of(run)[-1]["model_step"]
    assert best < 12
    (run / "checkpoints" / f"step_{best:08d}" / "model.safetensors").write_bytes(b"")
    kept = [event for event in events_of(run) if event["event"] not in ("test", "end")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    words += ["--resume_from_checkpoint", "latest"]
    with pytest.raises(
        CheckpointError, match="load_best_model_at_end: false to take the last model"
    ):
        train.main(words)
    assert "model.safetensors is damaged" in capsys.readouterr().err
    assert not [event for event in events_of(run) if event["event"] == "end"]
    train.main([*words, "--load_best_model_at_end", "false"])
    assert end_of(run) == (12, 12)


def test_pretrained_weights_that_overflow(finished: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Before the first update no learning rate is to blame: the message blames the pretrained weights."""
    sick = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(sick / "model.safetensors")
    save_file(
        {name: weights[name].sign() * 1e38 for name in weights},
        sick / "model.safetensors",
        {"format": "pt"},
    )
    words = job_of(finished, tmp_path / "run")
    with pytest.raises(UserError, match="update 1: .*Fix: other pretrained weights, smaller class"):
        train.main([*words, "--model_name_or_path", str(sick)])


def test_what_a_run_tells_of_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines tell what is trained; a log file, which has no progress bar, gets a line for each train event."""
    train.main([*words, "--max_steps", "3", "--logging_steps", "2"])
    told = capsys.readouterr().err
    assert re.search(
        r"training: \d+ rows, 3 updates of \d+ samples \(6 an epoch; 0 done\), .*: 1 x 2 x 4; ",
        told,
    )
    assert re.search(
        r"update 2 of 3: loss \d\.\d{4}, learning rate [\d.e-]+, [\d.]+ samples/s", told
    )
    assert "eval after update 3 (epoch 0.50): loss" in told
    assert "are one update" not in told


def test_fewer_rows_than_a_global_batch(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No empty micro-batches stand in for the missing rows."""
    train.main([*words, "--max_steps", "1", "--global_batch_size", "1000000"])
    told = capsys.readouterr().err
    (rows,) = re.findall(
        r"global_batch_size=1000000: more than the (\d+) training rows, so an epoch is one update",
        told,
    )
    assert f"training: {rows} rows, 1 update of {rows} samples (1 an epoch; 0 done)" in told
    assert read_receipt(tmp_path / "run")["accumulation_steps"] == 12  # 47 rows, 4 at once


@pytest.mark.parametrize("is_active", [True, False])
def test_the_command_that_is_told_works(
    is_active: bool, words: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the environment is not active, the printed command has the path of its Python."""
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin" if is_active else "/usr/bin")
    monkeypatch.chdir(folder.parent)
    train.main([*words, "--max_steps", "1"])
    place = "python" if is_active else f"bin/{Path(sys.executable).name}"
    assert f"predict: {place} -m accel_ft.predict --checkpoint" in capsys.readouterr().out


def test_divergence_never_replaces_the_sound_checkpoints(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = job_of(finished, run, "--logging_steps", "10")
    words += ["--learning_rate", "1e30", "--warmup_steps", "3", "--save_total_limit", "2"]
    with pytest.raises(UserError, match="update 3: the loss is nan"):
        train.main(words)
    oldest = min((run / "checkpoints").iterdir())
    weights = load_file(oldest / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_an_exports_card_names_the_package(finished: Path, tmp_path: Path) -> None:
    """A folder is not named, as its path means nothing on another machine."""
    for name, told in (("package://weights/model", True), (str(tmp_path / "model"), False)):
        run = shutil.copytree(finished, tmp_path / f"run_{told}")
        settings = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(settings | {"model_name_or_path": name}))
        out = tmp_path / f"out_{told}"
        export.main(["--checkpoint", str(run), "--output", str(out)])
        assert ("`model_name_or_path`" in (out / "README.md").read_text()) == told


def test_the_card_of_a_model_that_has_left_its_run(finished: Path, tmp_path: Path) -> None:
    """config.json gives the length and the pairs for its example code, which would otherwise predict other labels."""
    shutil.copytree(finished / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    for pairs in (False, True):
        text = json.dumps(config | {"text_pairs": pairs, "max_seq_length": 24})
        (tmp_path / "model/config.json").write_text(text)
        out = tmp_path / f"out_{pairs}"
        export.main(["--checkpoint", str(tmp_path / "model"), "--output", str(out)])
        card = (out / "README.md").read_text()
        assert "truncation=True, max_length=24)" in card
        assert ("was trained on pairs" in card) == pairs


def test_transformers_opens_model_and_checkpoint(finished: Path) -> None:
    from transformers import pipeline

    for folder in (finished / "model", finished / "checkpoints" / "step_00000012"):
        answer = pipeline("text-classification", model=str(folder))(["the goal of the striker"])
        assert answer[0]["label"] in {"World", "Sports", "Business", "Sci/Tech"}


def test_evaluate_gives_the_runs_own_figures(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = next(event for event in events_of(finished) if event["event"] == "test")
    for checkpoint in (finished, finished / "model", finished / "checkpoints" / "step_00000012"):
        evaluate.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "scores.json")])
        scores = json.loads(capsys.readouterr().out)
        assert scores == json.loads((tmp_path / "scores.json").read_text())
        assert (scores["split"], scores["num_samples"]) == ("test", 21)
        assert scores["accuracy"] == test["test_accuracy"]
        assert scores["loss"] == pytest.approx(test["test_loss"], rel=1e-5)


def test_predict_reads_as_it_writes(finished: Path, tmp_path: Path) -> None:
    """However many rows there are, memory holds a few thousand: each chunk is passed on before the next is read."""
    from accel_ft.config import PredictConfig
    from accel_ft.runtime.launch import make_accelerator

    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a goal"}\n' * 10_000)
    config = PredictConfig(checkpoint=str(finished), input=str(source))
    read = 0

    def counted() -> Iterator[Any]:
        nonlocal read
        for row in predict.open_rows(config):
            read += 1
            yield row

    written = 0
    for lines in predict.Predictor(config, make_accelerator()).label(counted()):
        size = len(list(lines))
        written += size
        assert read == written
        assert size <= 4096
    assert written == 10_000


def test_predict_keeps_order_and_ids(
    finished: Path,
    tmp_path: Path,
    odd_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import pipeline

    from accel_ft.data.sources import read_records

    monkeypatch.setattr(predict, "CHUNK_ROWS", 8)  # three chunks
    records = [record for _, record in read_records(str(odd_file), "csv")]
    model = tmp_path / "model"
    shutil.copytree(finished / "model", model)
    weights = load_file(model / "model.safetensors")
    weights["classifier.weight"] *= 1000  # otherwise all scores are nearly the same
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    classifier = pipeline("text-classification", model=str(model))
    answers = classifier([record["text"] for record in records])
    expected = [answer["label"] for answer in answers]
    scores = [answer["score"] for answer in answers]
    assert len({round(score, 4) for score in scores}) > len(scores) / 2

    predict.main(["--checkpoint", str(model), "--input", str(odd_file), "--all_scores"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in rows] == expected
    assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-5)
    assert [row["line"] for row in rows] == list(range(2, 23))
    assert all(max(row["scores"].values()) == row["score"] for row in rows)
    assert all(sum(row["scores"].values()) == pytest.approx(1, abs=1e-5) for row in rows)

    with_ids = tmp_path / "rows.jsonl"
    with_ids.write_text(
        "".join(
            json.dumps({"id": f"r{n}", "text": r["text"]}) + "\n" for n, r in enumerate(records)
        )
    )
    predict.main(
        [
            "--checkpoint",
            str(model),
            "--input",
            str(with_ids),
            "--output",
            str(tmp_path / "out"),
        ]
    )
    told = capsys.readouterr().err
    assert f"21 texts labelled: {tmp_path / 'out'}" in told
    assert "are cut" not in told
    words = [
        "--checkpoint",
        str(model),
        "--input",
        str(with_ids),
        "--output",
        str(tmp_path / "cut"),
    ]
    predict.main([*words, "--max_seq_length", "3"])
    assert "21 of 21 texts are cut at max_seq_length=3 tokens" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["id"], row["label"]) for row in rows] == [
        (f"r{n}", label) for n, label in enumerate(expected)
    ]

    class StandardInput:
        buffer = io.BufferedReader(io.BytesIO("".join(r["text"] + "\n" for r in records).encode()))

    monkeypatch.setattr("sys.stdin", StandardInput)
    predict.main(["--checkpoint", str(model), "--input", "-"])
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == expected

    lines = "\n".join(json.dumps({"text": record["text"]}) for record in records)
    StandardInput.buffer = io.BufferedReader(io.BytesIO(b"\xef\xbb\xbf \n" + lines.encode()))
    # JSON, despite the byte order mark and the blank line.
    predict.main(["--checkpoint", str(model), "--input", "-"])
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == expected

    predict.main(["--checkpoint", str(model), "--text", records[0]["text"]])
    assert json.loads(capsys.readouterr().out)["label"] == expected[0]

    half = tmp_path / "half.jsonl"
    half.write_text('{"id": "\\ud83d", "text": "x"}\n')
    predict.main(
        ["--checkpoint", str(model), "--input", str(half), "--output", str(tmp_path / "o")]
    )
    assert json.loads((tmp_path / "o").read_text(encoding="utf-8"))["id"] == "\ud83d"
    with pytest.raises(DataError, match="text: has an unpaired surrogate"):
        predict.main(["--checkpoint", str(model), "--text", "\ud83d"])
    from accel_ft import load_classifier

    with pytest.raises(DataError, match=r"texts\[1\]: has an unpaired surrogate"):
        load_classifier(model).predict(["x", "\ud83d"])

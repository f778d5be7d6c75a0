"""Model selection, imbalance and smoothing: each key does what it says, and a resume continues exactly."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import LATEST, WORDS, cut_off, events_of, run_hash, stopped_at

from accel_ft import load_classifier, train
from accel_ft.config import TrainConfig
from accel_ft.data.splits import load_splits
from accel_ft.engine.run import Run
from accel_ft.errors import CheckpointError, ConfigError, Preempted, UserError
from accel_ft.model import load


def test_early_stopping(words: list[str], tmp_path: Path) -> None:
    """No loss falls by 100: the first evaluation stays the best, and the third after it ends the run."""
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
    )  # more patience: it continues
    assert events_of(tmp_path / "run")[-1]["step"] == 6


def test_early_stopping_goes_on_after_a_resume(words: list[str], tmp_path: Path) -> None:
    """Evaluations before the kill count: the resumed run stops at the same update, with the same bits."""
    words += ["--learning_rate", "1e-30", "--eval_steps", "1", "--early_stopping_patience", "3"]
    words += ["--early_stopping_threshold", "0.01"]
    train.main(words)
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 2)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert events_of(tmp_path / "run")[-1]["step"] == 4
    assert run_hash(tmp_path / "run") == whole


def test_patience_counts_from_where_it_is_asked_for(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier evaluations do not count, or it would end at once; its updates are logged despite logging_steps 50."""
    words += ["--learning_rate", "1e-30", "--eval_steps", "1"]
    with pytest.raises(RuntimeError, match="stopped"):
        stopped_at(4, words)
    words += ["--early_stopping_patience", "2", "--early_stopping_threshold", "0.01"]
    train.main([*words, "--logging_steps", "50", *LATEST])
    events = events_of(tmp_path / "run")
    assert (events[-1]["step"], events[-1]["num_worse"]) == (6, 2)
    assert [e["step"] for e in events if e["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert (
        "stopped early, as no evaluation of the last 2 was better by more than 0.01"
        in capsys.readouterr().err
    )


def test_another_metric_goes_on_where_the_last_one_stopped(
    words: list[str], tmp_path: Path
) -> None:
    words += ["--eval_steps", "1", "--early_stopping_patience", "1"]
    words += ["--early_stopping_threshold", "100"]
    words += ["--load_best_model_at_end"]
    train.main([*words, "--metric_for_best_model", "accuracy"])
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000001")  # the best by accuracy is not needed
    train.main([*words, "--metric_for_best_model", "loss", *LATEST])
    assert [e["step"] for e in events_of(tmp_path / "run") if e["event"] == "eval"] == [1, 2, 3, 4]


def test_the_label_that_decides_is_shown(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "per_class.World.f1"
    train.main([*words, "--load_best_model_at_end", "--metric_for_best_model", name])
    told, events = capsys.readouterr(), events_of(tmp_path / "run")
    values = [e["eval_per_class"]["World"]["f1"] for e in events if e["event"] == "eval"]
    assert all(f"{name} {value:.4f}" in told.err for value in values)
    value = events[-1]["eval_per_class"]["World"]["f1"]
    assert f"{name} on the validation rows: {value:.4f}\n" in told.out
    assert f"{name} on the test rows: " in told.out


def test_checkpoints_that_a_kill_has_left_are_pruned(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no update is left, there is no save to prune them."""
    words += ["--save_total_limit", "2", "--max_steps", "4"]
    with monkeypatch.context() as patch:
        patch.setattr("accel_ft.checkpoint.transaction.prune", lambda *_: None)
        patch.setattr("accel_ft.engine.loop.finish", lambda _: killed())
        with pytest.raises(RuntimeError):
            train.main(words)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 4
    train.main([*words, *LATEST])
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == [
        "step_00000003", "step_00000004",
    ]  # fmt: skip


def test_no_checkpoint_is_nothing_to_prune(tmp_path: Path) -> None:
    watch = SimpleNamespace(check_folder=lambda: None)
    Run.prune(SimpleNamespace(checkpoints=tmp_path, watch=watch), 2, 1)


def killed() -> None:
    raise RuntimeError("killed")


def test_the_other_end_of_a_metric_is_another_choice(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`greater_is_better` is reversed at a resume: what was the best is now the worst."""
    words += ["--eval_steps", "1", "--load_best_model_at_end", "--metric_for_best_model", "loss"]
    with pytest.raises(RuntimeError):
        stopped_at(7, words)
    turned = [*words, "--greater_is_better", "true", *LATEST]
    train.main(turned)
    assert (
        "the best evaluation so far (by loss) no longer counts: the metric is now loss, the h"
        in capsys.readouterr().err
    )
    events = events_of(tmp_path / "run")
    losses = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval"}
    assert events[-1]["model_step"] == max(range(8, 13), key=losses.__getitem__)
    train.main([*words, *LATEST])
    told = capsys.readouterr().err
    assert "chosen by loss, the highest; no updates are left to choose one by loss" in told


def test_a_finished_choice_is_measured_on_other_rows_and_not_made_anew(
    words: list[str], tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On other rows, the best model and the last update stay; no updates are left to choose by another metric."""
    words += ["--eval_steps", "1", "--load_best_model_at_end", "--learning_rate", "1e-2"]
    words += ["--early_stopping_patience", "3", "--metric_for_best_model", "accuracy"]
    train.main(words)
    run, end = tmp_path / "run", events_of(tmp_path / "run")[-1]
    assert end["model_step"] < end["step"] < 12
    model = (run / "model/model.safetensors").read_bytes()
    shutil.rmtree(run / "model")
    with pytest.raises(
        CheckpointError, match="its model/ is missing. Fix: rerun its training command with"
    ):
        load_classifier(run)
    capsys.readouterr()
    train.main([*words, *LATEST])
    assert "its end is repeated" in capsys.readouterr().err
    assert (run / "model/model.safetensors").read_bytes() == model
    assert events_of(run)[-1]["model_step"] == end["model_step"]
    train.main([*words, "--validation_file", str(rows_file), *LATEST])
    assert "its end is repeated" in capsys.readouterr().err
    again = events_of(run)[-1]
    assert (again["step"], again["model_step"]) == (end["step"], end["model_step"])
    assert again["eval_loss"] != end["eval_loss"]
    assert (run / "model/model.safetensors").read_bytes() == model
    words += ["--validation_file", str(rows_file), "--max_steps", str(end["step"])]
    train.main([*words, "--metric_for_best_model", "loss", *LATEST])
    told = capsys.readouterr().err
    assert "was chosen by accuracy; no updates are left to choose one by loss" in told
    assert "nothing to do" in told
    other = tmp_path / "test.csv"
    other.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:9]))
    words += ["--test_file", str(other)]
    train.main([*words, "--metric_for_best_model", "loss", *LATEST])
    assert "its end is repeated" in capsys.readouterr().err
    assert json.loads((run / "receipt.json").read_text())["selection"]["metric"] == "accuracy"


def test_a_key_that_changes_nothing_leaves_a_finished_run_alone(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.main(words)
    (tmp_path / "run/model/notes.txt").touch()
    (tmp_path / "run/config.yaml").unlink()
    train.main([*words, "--metric_for_best_model", "f1_macro", *LATEST])
    assert "nothing to do" in capsys.readouterr().err
    assert (tmp_path / "run/model/notes.txt").is_file()
    train.main([*words, "--load_best_model_at_end", *LATEST])
    assert "its end is repeated" in capsys.readouterr().err
    assert not (tmp_path / "run/model/notes.txt").is_file()


def test_the_best_model_of_one_label(words: list[str], tmp_path: Path, rows_file: Path) -> None:
    """A label's own F1 decides; a label that no validation row has is refused before the training."""
    words += ["--load_best_model_at_end", "--eval_steps", "1", "--learning_rate", "5e-3"]
    words += ["--num_train_epochs", "8"]

    def scores(folder: Path) -> tuple[dict[str, dict[int, float]], int]:
        """Return the F1 by label (and `macro`, their mean) and update, and the update that was chosen."""
        events = events_of(folder)
        found = {e["step"]: e["eval_per_class"] for e in events if e["event"] == "eval"}
        f1 = {name: {at: each[name]["f1"] for at, each in found.items()} for name in WORDS}
        f1["macro"] = {e["step"]: e["eval_f1_macro"] for e in events if e["event"] == "eval"}
        return f1, events[-1]["model_step"]

    train.main([*words, "--metric_for_best_model", "f1_macro", "--output_dir", f"{tmp_path}/macro"])
    f1, of_macro = scores(tmp_path / "macro")
    label = next(name for name in WORDS if max(f1[name], key=f1[name].get) != of_macro)
    train.main([*words, "--metric_for_best_model", f"eval_per_class.{label}.f1"])
    f1, chosen = scores(tmp_path / "run")
    assert chosen == max(f1[label], key=f1[label].get) != of_macro
    words += ["--output_dir", str(tmp_path / "other"), "--metric_for_best_model"]
    with pytest.raises(
        ConfigError, match="no validation row has that label. Did you mean .Sports.?"
    ):
        train.main([*words, "per_class.Sport.f1"])
    without = tmp_path / "without.csv"
    without.write_text(re.sub(".*,Business\n", "", rows_file.read_text()))
    with pytest.raises(ConfigError, match="no validation row has that label"):
        train.main([*words, "per_class.Business.f1", "--validation_file", str(without)])
    with pytest.raises(ConfigError, match=r"Allowed: accuracy, .*, per_class.LABEL.f1"):
        train.main([*words, "per_class.Sports.support"])


@pytest.mark.parametrize("step", [3, 5, 11])
def test_the_best_model_after_a_resume(step: int, words: list[str], tmp_path: Path) -> None:
    """The same evaluation is the best. The metric may have the prefix that transformers gives it, `eval_`."""
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


def test_the_best_goes_along_to_another_folder(words: list[str], tmp_path: Path) -> None:
    words += [
        "--load_best_model_at_end",
        "--eval_steps",
        "1",
        "--metric_for_best_model",
        "f1_macro",
    ]
    train.main(words)
    whole = run_hash(tmp_path / "run")
    best = events_of(tmp_path / "run")[-1]["model_step"]
    assert 1 < best < 12
    checkpoint = tmp_path / f"run/checkpoints/step_{best:08d}"
    again = ["--output_dir", str(tmp_path / "again"), "--save_total_limit", "2"]
    train.main([*words, *again, "--resume_from_checkpoint", str(checkpoint)])
    assert events_of(tmp_path / "again")[-1]["model_step"] == best
    assert run_hash(tmp_path / "again")["model"] == whole["model"]


def test_a_model_that_returns_no_numbers_is_never_the_best(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The argmax of NaN is the first label: the share of its rows would pass for the accuracy."""
    words += ["--max_steps", "2", "--eval_steps", "1", "--learning_rate", "1e36"]
    words += ["--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "1"]
    words += ["--metric_for_best_model", "accuracy", "--seed", "0"]
    first = ["--validation_file", str(tmp_path / "first.csv")]
    lines = Path(words[words.index("--train_file") + 1]).read_text().splitlines()
    kept = [lines[0], *(line for line in lines if line.endswith("Business"))]  # the first by name
    Path(first[1]).write_text("\n".join(kept))
    train.main([*words, *first, "--load_best_model_at_end"])
    events = events_of(tmp_path / "run")
    first_of_all, sick = [event for event in events if event["event"] == "eval"]
    assert 0 <= first_of_all["eval_accuracy"] <= 1
    assert {sick[f"eval_{name}"] for name in ("loss", "accuracy", "f1_macro", "roc_auc")} == {None}
    assert sick["eval_per_class"]["Business"]["f1"] is None
    assert events[-1]["model_step"] == 1
    assert f"rows with NaN or infinite logits: {len(kept) - 1}\n" in capsys.readouterr().err
    other = ["--output_dir", str(tmp_path / "other")]
    with pytest.raises(UserError, match="the model of update 2 returns NaN or infinite logits"):
        train.main([*words, *first, *other])
    assert not (tmp_path / "other/model").exists()


def test_rows_without_numbers_are_counted(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single bad row points to the data rather than to the model: the message gives their number."""
    measure = Run.measure

    def one_is_sick(*args: Any) -> Any:
        scores, logits = measure(*args)
        logits[3, 1] = np.inf
        return scores, logits

    monkeypatch.setattr(Run, "measure", one_is_sick)
    with pytest.raises(UserError, match=r"infinite logits for 1 of 21 validation rows; no model"):
        train.main([*words, "--max_steps", "1"])


def test_a_damaged_best_checkpoint_is_told_at_the_resume(
    words: list[str], tmp_path: Path, odd_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the best of the later evaluations is kept, rather than a checkpoint that cannot be loaded."""
    words += ["--load_best_model_at_end", "--eval_steps", "2", "--save_steps", "3"]
    words += ["--metric_for_best_model", "loss", "--greater_is_better", "true"]
    words += ["--test_file", str(odd_file)]
    with pytest.raises(RuntimeError):
        stopped_at(7, words)
    weights = tmp_path / "run/checkpoints/step_00000002/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    train.main([*words, *LATEST])
    told = capsys.readouterr().err
    assert "step_00000002: model.safetensors is damaged" in told
    assert (weights.parents[1] / "damaged-step_00000002/optimizer.bin").is_file()
    assert (
        "the best evaluation so far (by loss, the highest) no longer counts: its checkpoint is lost"
        in told
    )
    events = events_of(tmp_path / "run")
    losses = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval" and e["step"] > 6}
    best = max(losses, key=losses.get)
    assert best < 12  # otherwise this shows nothing
    assert [e["model_step"] for e in events if e["event"] in ("test", "end")] == [best, best]
    assert f"test after update {best} (epoch" in told


def test_a_best_checkpoint_that_is_kept_no_longer_is_told(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forget load_best_model_at_end at a resume, and a warning comes before the checkpoint is gone."""
    words += ["--eval_steps", "2", "--save_steps", "2", "--metric_for_best_model", "loss"]
    words += ["--greater_is_better", "true", "--save_total_limit", "2"]
    with pytest.raises(RuntimeError):
        stopped_at(9, [*words, "--load_best_model_at_end"])
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()
    told = "the checkpoint of the best evaluation, of update 2, will be pruned like others"
    train.main([*words, "--load_best_model_at_end", "--max_steps", "8", *LATEST])
    assert told not in capsys.readouterr().err
    # Without load_best_model_at_end, the keys of the metric have no effect.
    words[words.index("--metric_for_best_model") :] = ["--save_total_limit", "2"]
    shutil.copytree(tmp_path / "run", tmp_path / "all")
    everything = ["--output_dir", str(tmp_path / "all"), "--save_total_limit", "none"]
    train.main([*words, "--max_steps", "10", *LATEST, *everything])
    assert "will be pruned like others" not in capsys.readouterr().err  # none is pruned
    train.main([*words, "--max_steps", "10", *LATEST])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run/checkpoints/step_00000002").exists()
    train.main([*words, "--max_steps", "12", *LATEST])
    assert "will be pruned like others" not in capsys.readouterr().err


def test_a_run_that_is_to_end_where_it_stands_is_evaluated_there(
    words: list[str], tmp_path: Path
) -> None:
    """max_steps is lowered to the last checkpoint's update: it was not evaluated yet, and may be the best."""
    words += ["--eval_steps", "3", "--save_steps", "1", "--load_best_model_at_end"]
    words += ["--metric_for_best_model", "loss"]
    with pytest.raises(RuntimeError):
        stopped_at(5, words)
    train.main([*words, "--max_steps", "5", *LATEST])
    events = events_of(tmp_path / "run")
    losses = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval"}
    assert list(losses) == [3, 5]
    best = min(losses, key=losses.__getitem__)
    assert (events[-1]["model_step"], best) == (5, 5)  # otherwise the rest shows nothing
    shutil.rmtree(tmp_path / "run/model")  # no checkpoint records that evaluation
    train.main([*words, "--max_steps", "5", *LATEST])
    events = events_of(tmp_path / "run")
    assert [e["step"] for e in events if e["event"] == "eval"] == [3, 5]
    assert events[-1]["model_step"] == 5


def test_what_was_evaluated_elsewhere_is_not_evaluated_again(
    words: list[str], tmp_path: Path
) -> None:
    """The evaluation is only in the other folder's log. Evaluated again, it would use up patience."""
    words += ["--learning_rate", "1e-30", "--eval_steps", "6", "--early_stopping_patience", "2"]
    words += ["--early_stopping_threshold", "0.01"]
    train.main(words)
    last = tmp_path / "run/checkpoints/step_00000012"
    other = ["--output_dir", str(tmp_path / "other"), "--resume_from_checkpoint", str(last)]
    train.main([*words, *other])
    ends = [events_of(tmp_path / name)[-1] for name in ("run", "other")]
    assert [end["num_worse"] for end in ends] == [1, 1]


@pytest.mark.parametrize("changed", ["metric", "rows", "lost"])
def test_the_last_evaluation_is_made_up_for_by_another_rule(
    changed: str, words: list[str], tmp_path: Path, rows_file: Path
) -> None:
    """Preempted before its last evaluation; then metric or rows change, or the best is lost: none is left to beat."""
    words += ["--eval_steps", "3", "--save_steps", "3", "--load_best_model_at_end"]
    words += ["--metric_for_best_model", "loss", "--greater_is_better", "true"]
    evaluate = Run.evaluate

    def signalled(run: Run) -> bool:
        run.watch.stop_signal = signal.SIGTERM * (run.step == 12)
        return evaluate(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", signalled)
        with pytest.raises(Preempted):
            train.main(words)
    if changed == "metric":
        words[-4:] = ["--metric_for_best_model", "accuracy"]
    elif changed == "rows":
        words += ["--validation_file", str(rows_file)]
    else:
        (tmp_path / "run/checkpoints/step_00000003/optimizer.bin").unlink()
    train.main([*words, *LATEST])
    end = events_of(tmp_path / "run")[-1]
    assert (end["event"], end["model_step"]) == ("end", 12)


def test_a_best_model_that_is_lost_is_not_replaced_by_the_last(
    words: list[str], tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the end of the training, nor when the end of a finished run is repeated."""
    from accel_ft.engine import loop

    words += ["--eval_steps", "2", "--save_steps", "3", "--load_best_model_at_end"]
    words += ["--metric_for_best_model", "loss", "--greater_is_better", "true"]
    weights, finish = tmp_path / "run/checkpoints/step_00000002/model.safetensors", loop.finish

    def damage(run: object) -> None:
        run.wait_for_publication()
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        finish(run)

    told = "step_00000002: is missing or damaged, .* no updates are left .* take the last model"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", damage)
        with pytest.raises(CheckpointError, match=told):
            train.main(words)
    assert not (tmp_path / "run/model").exists()
    with pytest.raises(CheckpointError, match=told):
        train.main([*words, *LATEST])
    other = [*words, "--output_dir", str(tmp_path / "other")]
    train.main(other)
    assert events_of(tmp_path / "other")[-1]["model_step"] == 2
    shutil.rmtree(tmp_path / "other/checkpoints/step_00000002")  # to save space
    model = tmp_path / "other/model/model.safetensors"
    before = model.read_bytes()
    with pytest.raises(CheckpointError, match=told):
        train.main([*other, "--test_file", str(rows_file), *LATEST])
    assert model.read_bytes() == before
    train.main([*other, "--load_best_model_at_end", "false", *LATEST])
    assert model.read_bytes() != before


def test_a_best_model_that_is_the_last_need_not_be_loaded(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.engine import loop

    finish = loop.finish

    def damage(run: object) -> None:
        run.wait_for_publication()
        shutil.rmtree(tmp_path / "run/checkpoints/step_00000012")
        finish(run)

    monkeypatch.setattr(loop, "finish", damage)
    train.main([*words, "--eval_steps", "12", "--load_best_model_at_end"])
    assert events_of(tmp_path / "run")[-1]["model_step"] == 12


def test_the_best_of_before_a_rollback_is_still_there(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback passes the newest best, to a checkpoint whose own best is older and must not have been pruned."""
    from accel_ft.engine import loop

    words += ["--load_best_model_at_end", "--metric_for_best_model", "loss", "--eval_steps", "2"]
    words += ["--save_steps", "2", "--save_total_limit", "2", "--on_nonfinite", "rollback"]
    losses, sick = {2: 1.0, 4: 3.0, 6: 2.0, 8: 0.5}, {9, 10}
    forward, measure, seen = loop.forward, Run.measure, {}

    def measured(run: Run, *args: object, **about: int):
        scores, logits = measure(run, *args, **about)
        return scores | {"loss": losses.pop(run.step, 4.0)}, logits  # then worse than all

    def spoilt(model, batch):
        logits = forward(model, batch)
        run = seen["run"]
        return logits * float("nan") if run.step + 1 in sick else logits

    def noted(run: Run, update=loop.update):
        seen["run"] = run
        update(run)

    monkeypatch.setattr(Run, "measure", measured)
    monkeypatch.setattr(loop, "forward", spoilt)
    monkeypatch.setattr(loop, "update", noted)
    train.main(words)
    events = events_of(tmp_path / "run")
    assert [e["update"] for e in events if e["event"] == "nonfinite"] == [9, 10]
    assert events[-1]["model_step"] == 2


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
    """Both labels occur equally often; every row occurs, the rare ones four or five times."""
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


def test_a_label_much_rarer_than_others_makes_a_long_epoch(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rare.csv"
    labels = ["a"] * 20 + list("bcdefghij")
    path.write_text("text,label\n" + "".join(f"goal {n},{x}\n" for n, x in enumerate(labels)))
    config = TrainConfig(train_file=path, validation_file=path)
    split = load_splits(config, load.load_tokenizer(str(tiny_model))).train
    split.oversample()
    assert "an epoch is 7 times as long" in caplog.text
    assert np.bincount(split.labels(np.arange(len(split)))).tolist() == [20] * 10
    assert set(split.ids(np.arange(len(split)))) == set(range(29))


def test_the_copies_are_not_those_of_the_first_rows(tmp_path: Path, tiny_model: Path) -> None:
    """Of 30 rows each occurs once, of 20 ten occur twice: which ones does not depend on the file's order."""
    path = tmp_path / "sorted.csv"
    rows = [["goal", "Sports"]] * 30 + [["bank", "Business"]] * 20
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *rows])
    config = TrainConfig(train_file=path, validation_file=path)
    train_split = load_splits(config, load.load_tokenizer(str(tiny_model))).train
    train_split.oversample()
    ids = np.bincount(train_split.ids(np.arange(60)))
    assert sorted(ids.tolist()) == [1] * 40 + [2] * 10
    assert ids[30:40].sum() < 20


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

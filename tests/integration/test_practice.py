"""What a user does around a run: changes in between, the Python API, fitting, hand-over."""

import ast
import contextlib
import errno
import io
import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import (
    LATEST,
    cut_off,
    events_of,
    make_tiny_model,
    run_hash,
    stopped_at,
    write_rows,
)
from conftest import run as start
from safetensors.torch import load_file, save_file

from accel_ft import evaluate, export, fit, load_classifier, predict, train
from accel_ft.config import TrainConfig
from accel_ft.errors import CheckpointError, ConfigError, DataError, UserError


def test_rank_0_says_what_is_opened(
    tiny_model: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run in progress, ranks may see different newest checkpoints: all open the one that rank 0 names."""

    def refuse(checkpoint: str, accelerator: Any) -> str:
        raise CheckpointError(f"rank {accelerator.process_index} finds none")

    monkeypatch.setattr("accel_ft.checkpoint.open.same_folder", refuse)
    for command, words in ((evaluate, ["--test_file", str(rows_file)]), (predict, ["--text", "a"])):
        with pytest.raises(CheckpointError, match="^rank 0 finds none$"):
            command.main(["--checkpoint", str(tiny_model), *words])


def test_a_users_model_folder_is_kept(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "run/model")
    (tmp_path / "run/model/NOTES.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds a `model` but no receipt.json"):
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


def test_lists_may_be_changed_by_name(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--max_steps", "2"])
    words = [*words, *LATEST, "--max_steps", "3", "--class_weights", "1,2,3,4"]
    with pytest.raises(CheckpointError, match="class_weights: None in the checkpoint"):
        train.main(words)
    train.main([*words, "--allow_changed", "class_weights"])
    make_tiny_model(tmp_path / "narrow", hidden_size=16)
    other = ["--model_name_or_path", str(tmp_path / "narrow"), "--max_steps", "4"]
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .* size mismatch for bert\..*"):
        train.main([*words, *other, "--allow_changed", "model_name_or_path,class_weights"])


def test_a_model_that_left_its_run_is_measured_as_in_it(
    words: list[str], tmp_path: Path, odd_file: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The exported model truncates at the same length and has the same loss; so has model/, opened as `.`."""
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
    capsys.readouterr()
    settings = Path("../config.yaml")
    told = settings.read_text()
    settings.write_text(told.replace("max_eval_samples: null", "max_eval_samples: 5"))
    evaluate.main(["--checkpoint", "."])  # the run's own value applies to its validation rows only
    assert json.loads(capsys.readouterr().out)["num_samples"] == 21
    # Given here, it applies to any rows.
    evaluate.main(["--checkpoint", ".", "--max_eval_samples", "5"])
    assert json.loads(capsys.readouterr().out)["num_samples"] == 5
    settings.write_text(told)
    with pytest.raises(
        ConfigError, match="belongs to no run, so its rows are unknown. Fix: --test_file"
    ):
        evaluate.main(["--checkpoint", str(out)])
    settings.write_text(re.sub("test_file: .*", "test_file: rows/of.csv", settings.read_text()))
    with pytest.raises(
        ConfigError,
        match=r"test_file=rows/of.csv: .* from the run's config.yaml\). Fix: start from the folder",
    ):
        evaluate.main(["--checkpoint", "."])


def test_rows_that_change_beside_a_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Changed during the training: no mistakes.jsonl, which would quote other texts. Afterwards: `evaluate` warns that
    the rows may have been trained on. Other validation rows at a resume: the best evaluation no longer counts.
    """
    from accel_ft.engine import loop
    from accel_ft.reporting.record import read_record

    rows, held_out = (write_rows(tmp_path / f"{n}.csv", n, seed=n) for n in (40, 30))
    words = [*words[:2], *words[8:], "--train_file", str(rows), "--load_best_model_at_end"]
    words += ["--max_eval_samples", "3"]
    finish = loop.finish

    def change(run: object) -> None:
        write_rows(rows, 60, seed=3)
        finish(run)

    with monkeypatch.context() as patch, caplog.at_level("WARNING", logger="accel_ft"):
        patch.setattr(loop, "finish", change)
        patch.setattr("accel_ft.runtime.logging.setup_logging", lambda is_main: None)
        train.main(words)
        assert "has changed since it was read: no mistakes.jsonl" in caplog.text
        assert (tmp_path / "run/model/README.md").is_file()
        assert not (tmp_path / "run/mistakes.jsonl").exists()
        assert read_record(tmp_path / "run").mistakes == []
        evaluate.main(["--checkpoint", str(tmp_path / "run")])
        assert "it may have trained on some" in caplog.text
        assert "--test_split_name" not in caplog.text
        caplog.clear()
        write_rows(rows, 40, seed=40)
        for more in ([], ["--max_eval_samples", "2"], ["--max_eval_samples", "none"]):
            evaluate.main(["--checkpoint", str(tmp_path / "run"), *more])
            assert "trained on" not in caplog.text
        words += ["--output_dir", str(tmp_path / "b"), "--validation_file"]
        with pytest.raises(RuntimeError):
            stopped_at(8, [*words, str(held_out)])
        train.main([*words, str(rows), *LATEST])
        assert (
            "the best evaluation so far (by accuracy) no longer counts: the validation rows have changed"
            in caplog.text
        )


def test_a_full_disk_is_met_before_the_old_model_goes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.engine import start

    train.main(words)
    full = type("Usage", (), {"free": 0})
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: full)
    with pytest.raises(CheckpointError, match="0 MB are free"):
        train.main([*words, "--num_train_epochs", "4", *LATEST])
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert events_of(tmp_path / "run")[-1]["event"] == "end"


def test_a_run_needs_the_checkpoints_that_it_will_write(tmp_path: Path) -> None:
    """Bytes per parameter: 12 for each checkpoint that exists at the same time, 4 for the final model."""
    from accel_ft.engine.start import checkpoint_bytes

    run: Any = SimpleNamespace(num_parameters=1, num_trained=1)

    def need(updates: int, *more: Any, done: int = 0, **keys: Any) -> int:
        config = TrainConfig(output_dir=tmp_path, **keys)
        return checkpoint_bytes(run, config, range(done + 1, updates + 1), 50, *more)

    assert need(100) == 4 + 12  # one checkpoint, at the end
    assert need(100, 0, True) == 4 + 2 * 12
    # Save, evaluation and end fall on the same update.
    assert need(500, eval_steps=500, load_best_model_at_end=True) == 4 + 12
    assert need(120, load_best_model_at_end=True, save_total_limit=None) == 4 + 3 * 12
    assert need(10**4) == 4 + 3 * 12  # save_total_limit=2, and the one being written
    assert need(10**4, 2) == 4 + 12
    assert need(1200, done=1100) == 4 + 12
    assert need(100, done=100) == 4


def test_a_label_that_no_test_row_has_has_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(output_dir=tmp_path, metric_for_best_model="per_class.a.f1")
    events = [
        {"event": "test", "test_per_class": {"a": {"f1": 0.0, "support": 0}}},
        {"event": "end", "eval_per_class": {"a": {"f1": 0.5, "support": 3}}},
    ]
    train._say_farewell(config, events)
    told = capsys.readouterr().out
    assert "validation rows: 0.5000\n" in told
    assert "per_class.a.f1 on the test rows: no row has that label\n" in told


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # __del__ closes
def test_a_disk_that_is_full_when_a_line_or_the_card_is_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.reporting import report
    from accel_ft.runtime import files

    run, write_whole = tmp_path / "run", files.write_whole
    whole = Path.open

    class Full(io.StringIO):
        def close(self) -> None:
            # A real file raises this without its name, too.
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        is_log = path.name == "metrics.jsonl" and mode == "a" and path.exists()
        return Full() if is_log else whole(path, mode, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        told = r"run/metrics.jsonl: cannot be written \(No space left on device\). Fix: free disk space"
        with pytest.raises(CheckpointError, match=told):
            train.main(words)

    words += ["--report_to", "html"]
    for name, owner in (("report.html", report), ("model/README.md", files)):

        def write(path: Path, text: str, name: str = name) -> None:
            if str(path).endswith(name):
                raise OSError(errno.ENOSPC, "No space left on device")
            write_whole(path, text)

        with monkeypatch.context() as patch:
            patch.setattr(owner, "write_whole", write)
            with pytest.raises(CheckpointError, match=f"{name}: .* \\(No space .* the model is"):
                train.main([*words, *LATEST])
        assert events_of(run)[-1]["event"] == "end"
    train.main([*words, *LATEST])
    assert (run / "report.html").is_file()
    assert (run / "model/README.md").is_file()


@pytest.mark.parametrize("where", ["model_config", "rows"])
def test_ctrl_c_with_nothing_to_save_can_be_caught(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, which survives Ctrl-C: the same settings then train. Code that catches all exceptions from
    other people's files must not swallow it.
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


def test_what_predict_is_given(
    words: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.main([*words, "--max_steps", "1"])
    classifier = load_classifier(tmp_path / "run")
    texts = ["a goal", "the bank"]
    plain = [
        row | {"score": pytest.approx(row["score"], rel=1e-6)} for row in classifier.predict(texts)
    ]
    monkeypatch.setattr(predict, "CHUNK_ROWS", 1)
    assert classifier.predict(texts) == plain
    assert classifier.predict(np.array(texts, dtype=object)) == plain
    for bad, words in (
        (["a", None], r"texts\[1\]: is None, not a text"),
        (["a", ("a", "b")], r"texts\[1\]: is \('a', 'b'\), not a text"),
        ([("a", "b"), "a"], r"texts\[1\]: is 'a', not a pair"),
        ([["secret" * 50]], r"texts\[0\]: is \('secret.{,40}\.\.\., not a pair"),
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
    monkeypatch.setattr(
        "sys.stdin",
        io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'[ {"text": "a"},\n{"text": "b"}]'))),
    )
    predict.main([*command, "-"])
    assert [json.loads(line)["item"] for line in out.read_text().splitlines()] == [1, 2]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"[\n"))))
    with pytest.raises(ConfigError, match="may be lines or JSON. Fix: --input_format"):
        predict.main([*command, "-"])
    with pytest.raises(ConfigError, match="standard input cannot be parquet"):
        predict.main([*command, "-", "--input_format", "parquet"])
    rows.rename(tmp_path / "in.ndjson")
    with pytest.raises(ConfigError, match=r"in.ndjson: unknown format. Fix: --input_format"):
        predict.main([*command, str(tmp_path / "in.ndjson")])


def test_predict_tells_a_fault_in_the_last_row_first(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.main([*words, "--max_steps", "1"])
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "goal\n" * 40 + "a,b\n")
    monkeypatch.setattr(predict, "Predictor", lambda *_: pytest.fail("labels rows"))
    with pytest.raises(DataError, match="line 42: 2 fields, where the header has 1"):
        predict.main(["--checkpoint", str(tmp_path / "run"), "--input", str(file)])


def test_evaluate_reads_the_rows_it_measures_alone(
    words: list[str], tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's training and validation files, which may be large, are not even hashed."""
    from accel_ft.data import sources

    test = tmp_path / "test.csv"
    shutil.copy(rows_file, test)
    train.main([*words, "--max_steps", "1", "--test_file", str(test)])
    read: list[Path] = []
    hashed = sources.sha256
    monkeypatch.setattr(sources, "sha256", lambda path: (read.append(path), hashed(path))[1])
    evaluate.main(["--checkpoint", str(tmp_path / "run")])
    assert set(read) == {test}


def test_a_multi_label_model_without_problem_type(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many older multi-label models have no problem_type in their config: --problem_type gives it."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"text": "goal", "label": ["Sports", "World"]}, {"text": "bank", "label": []}] * 8
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    several = ["--problem_type", "multi_label_classification"]
    files = ["--train_file", str(rows), "--validation_file", str(rows), "--test_file", str(rows)]
    train.main([*words, *files, *several, "--max_steps", "1"])
    shutil.move(tmp_path / "run/model", tmp_path / "old")
    about = json.loads((tmp_path / "old/config.json").read_text())
    del about["problem_type"]
    (tmp_path / "old/config.json").write_text(json.dumps(about))
    capsys.readouterr()
    command = ["--checkpoint", str(tmp_path / "old"), "--test_file", str(rows)]
    evaluate.main([*command, *several])
    assert "f1_micro" in json.loads(capsys.readouterr().out)
    for kind, fault in (
        ("multi_label_classification", "problem_type=regression: .* is for multi_label"),
        ("regression", "predicts 2 numbers; only one is supported"),
    ):
        (tmp_path / "old/config.json").write_text(json.dumps(about | {"problem_type": kind}))
        with pytest.raises(ConfigError, match=fault):
            evaluate.main([*command, "--problem_type", "regression"])


def test_a_head_without_names_is_measured_by_ids(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "plain")
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\ngoal,0\nbank,1\n")
    command = ["--checkpoint", str(tmp_path / "plain"), "--test_file", str(rows)]
    evaluate.main(command)
    assert set(json.loads(capsys.readouterr().out)["per_class"]) == {"LABEL_0", "LABEL_1"}
    rows.write_text("text,label\ngoal,0\nbank,2\n")
    with pytest.raises(DataError, match="Allowed: LABEL_0, LABEL_1\n.*label '2' is none of these"):
        evaluate.main(command)


def test_folders_that_are_nearly_checkpoints(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--max_steps", "1"])
    for folder in (tmp_path, tmp_path / "run/checkpoints"):
        with pytest.raises(ConfigError, match=r"holds no model .* of a run, or of a checkpoint"):
            predict.main(["--checkpoint", str(folder), "--text", "a"])
    again = [*words, "--output_dir", str(tmp_path / "b")]
    with pytest.raises(CheckpointError, match="run: is a run, not a checkpoint. Fix: a folder in"):
        train.main([*again, "--resume_from_checkpoint", str(tmp_path / "run")])
    with pytest.raises(
        CheckpointError, match="run: is a run, not a checkpoint. Fix: latest, or a f"
    ):
        train.main([*words, "--resume_from_checkpoint", str(tmp_path / "run")])


def test_a_resume_that_trains_nothing_says_so(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: `predict` warns of a pair of texts if the model was trained on single texts."""
    train.main([*words, "--max_steps", "4"])
    longer = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoints/step_00000004")]
    longer += ["--output_dir", str(tmp_path / "new run")]
    with pytest.raises(
        CheckpointError, match=r"step_00000004: update 4 is done, but .* has only 2\."
    ):
        train.main([*words, "--max_steps", "2", *longer])
    for _ in range(2):  # with its model/, and without: the refusal changes nothing
        with pytest.raises(
            CheckpointError, match=r"run: update 4 is done, but the job has only 2\."
        ):
            train.main([*words, "--max_steps", "2", *LATEST])
        shutil.rmtree(tmp_path / "run/model", ignore_errors=True)
    train.main([*words, "--max_steps", "4", *longer])
    done = capsys.readouterr()
    assert "4 of 4 updates done\n" in done.err
    assert f"--checkpoint '{tmp_path}/new run/model' --text" in done.out  # quoted for a shell
    predict.main(["--checkpoint", str(tmp_path / "new run"), "--text", "a", "--text_pair", "b"])
    assert "run/model: was trained on single texts, not on pairs" in capsys.readouterr().err


# From Python


def test_what_is_switched_on_around_it_changes_nothing(
    tmp_path: Path, tiny_model: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, gradients may be off; in a service, autocast may be on: weights and scores stay the same.
    `fit` under autocast is refused.
    """
    from accel_ft.predict import Alone

    keys: dict[str, Any] = {"model_name_or_path": str(tiny_model), "train_file": rows_file}
    keys |= {"max_steps": 2, "max_seq_length": 32, "global_batch_size": 8, "report_to": "none"}
    weights = set()
    switches = {"as it is": contextlib.nullcontext(), "no gradients": torch.no_grad()}
    for name, switch in (switches | {"inference": torch.inference_mode()}).items():
        with switch:
            model = fit(**keys, output_dir=tmp_path / name)
            assert torch.is_grad_enabled() == (name == "as it is")
        weights.add((model / "model.safetensors").read_bytes())
    assert len(weights) == 1
    classifier, texts = load_classifier(model, all_scores=True), ["a goal", "profit"]
    found = classifier.predict(texts)
    with torch.autocast("cpu", torch.bfloat16):
        assert classifier.predict(texts) == found
        with pytest.raises(ConfigError, match="fit: is called under torch.autocast. Fix: call it"):
            fit(**keys, output_dir=tmp_path / "autocast")
    rare = classifier.describe(np.array([1.25e-7, 0.25, 0.25, 0.5]))["scores"]
    assert min(rare.values()) == 1.25e-7
    half = Alone(torch.device("cpu"), "bf16")
    monkeypatch.setattr(classifier, "accelerator", half)  # as if launched in bf16
    assert classifier.predict(texts) != found


@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_pickled_classifier_goes_to_another_process(
    tmp_path: Path, tiny_model: Path, num_labels: int
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=num_labels)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    classifier = load_classifier(tmp_path)
    (tmp_path / "pickled").write_bytes(pickle.dumps(classifier))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).predict(['a goal']))"
    done = start("python", "-c", program, tmp_path / "pickled")
    (there,), (here,) = ast.literal_eval(done.stdout), classifier.predict(["a goal"])
    assert there == here | {"score": pytest.approx(here["score"], rel=1e-5)}


def test_fit_and_load_classifier(tmp_path: Path, tiny_model: Path, rows_file: Path) -> None:
    model = fit(
        model_name_or_path=str(tiny_model), train_file=rows_file, output_dir=tmp_path / "run",
        num_train_epochs=30, learning_rate=5e-3, max_seq_length=32, save_steps=1000,
        global_batch_size=8, seed=0,
    )  # fmt: skip
    found = load_classifier(model).predict(["goal striker league coach", "bank profit shares"])
    assert [each["label"] for each in found] == ["Sports", "Business"]
    assert load_classifier(model).predict([]) == []
    with pytest.raises(TypeError, match="not a table. Fix: .* one of its columns"):
        load_classifier(model).predict({"text": ["a", "b"]})
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: true given. Allowed: latest\|"):
        fit(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="batch_size, device: unknown. Allowed: all_scores, max_"):
        load_classifier(model, device="cuda", batch_size=3)
    with pytest.raises(ConfigError, match="config: must be the path of a YAML file"):
        fit({"train_file": rows_file})
    job = tmp_path / "run/config.yaml"
    with pytest.raises(ConfigError, match=r"config.yaml: there is no such file"):
        fit(tmp_path / "gone/config.yaml")
    assert fit(job, max_steps=1, output_dir=tmp_path / "two") == tmp_path / "two/model"
    assert yaml.safe_load((tmp_path / "two/config.yaml").read_text()) == yaml.safe_load(
        job.read_text()
    ) | {"max_steps": 1, "output_dir": str(tmp_path / "two")}
    with pytest.raises(
        ConfigError, match="learning_rat: unknown key. Did you mean `learning_rate`"
    ):
        fit(learning_rat=1)
    own = Accelerator(cpu=True, gradient_accumulation_steps=4)
    load_classifier(model)
    assert own.gradient_accumulation_steps == 4


@pytest.mark.parametrize("call", ["fit", "a fit that fails"])
def test_a_guest_leaves_the_process_as_it_was(
    call: str, tmp_path: Path, tiny_model: Path, rows_file: Path
) -> None:
    import random

    from transformers.utils import logging

    job: dict[str, Any] = {"model_name_or_path": str(tiny_model), "train_file": rows_file}
    job |= {"max_steps": 2, "max_seq_length": 32, "output_dir": tmp_path / "run"}
    fit(**job)
    own = Accelerator(cpu=True, gradient_accumulation_steps=4)
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)

    def state() -> list[Any]:
        dice = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
        return [own.gradient_accumulation_steps, *dice, *shown]

    before = state()
    assert before[0] == 4
    assert before[-2:] == [logging.WARNING, True]
    if call == "fit":
        fit(**job | {"output_dir": tmp_path / "again"})
    else:
        with pytest.raises(ConfigError, match="the model takes"):
            fit(**job | {"output_dir": tmp_path / "again", "max_seq_length": 10**5})
    assert state() == before


def test_one_fit_at_a_time(
    tmp_path: Path, tiny_model: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once would share accelerate's gradient accumulation and the random number generators."""
    import accel_ft

    job: dict[str, Any] = {"model_name_or_path": str(tiny_model), "train_file": rows_file}
    job |= {"max_steps": 1, "max_seq_length": 32}
    folders = iter("abc")

    def fit() -> None:
        accel_ft.fit(**job, output_dir=tmp_path / next(folders))

    def meanwhile(_: object) -> None:
        with pytest.raises(ConfigError, match="another `fit` runs in this process"):
            fit()
        raise UserError("enough")

    with monkeypatch.context() as patch:
        patch.setattr(train, "fit", meanwhile)
        with pytest.raises(UserError, match="enough"):
            fit()
    fit()


@pytest.mark.parametrize("extra", ["lora", "onnx", "report", "search", "trackio"])
def test_a_missing_extra_is_named(
    extra: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before anything is loaded or written."""
    from conftest import ROOT

    from accel_ft import errors, search
    from accel_ft.reporting import report
    from accel_ft.runtime import trackers

    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    words += ["--model_name_or_path", "no/model"]
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    files = ["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "job.yaml")]
    out = ["--checkpoint", "no/model", "--output", str(tmp_path / "out")]
    calls = {
        "lora": lambda: train.main([*words, "--lora_r", "4"]),
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
    """With less memory: smaller micro-batches, more accumulation steps, the same global batch, a similar first loss."""
    from accel_ft.engine import fitting

    train.main([*words, "--per_device_train_batch_size", "8"])
    losses = [e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    words += ["--per_device_train_batch_size", "auto"]
    measured = []

    def keep(*args, measure=fitting.measured_need):
        measured.append(measure(*args))
        return measured[-1]

    monkeypatch.setattr(fitting, "measured_need", keep)
    masks, forward = [], fitting.forward
    monkeypatch.setattr(
        fitting, "forward", lambda *a: masks.append(a[1]["attention_mask"]) or forward(*a)
    )
    train.main([*words, "--output_dir", str(tmp_path / "much")])
    assert masks
    # A mask without padding may be skipped by the model, and its memory not measured.
    assert not any(mask.all() for mask in masks)
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
    assert again[0] == pytest.approx(losses[0], rel=0.2)  # other dropout masks
    whole = run_hash(tmp_path / "little")
    cut_off(tmp_path / "little", 6)
    # More would fit now; a resume keeps the split.
    monkeypatch.setattr(fitting, "device_bytes", lambda _: 10 * three_rows)
    train.main([*words, "--output_dir", str(tmp_path / "little"), *LATEST])
    assert run_hash(tmp_path / "little") == whole
    inside = tmp_path / "little/checkpoints/mine"  # a new run, though inside the folder of another
    train.main([*words, "--max_steps", "1", "--output_dir", str(inside), *LATEST])
    assert json.loads((inside / "receipt.json").read_text())["accumulation_steps"] == 1
    (inside / "config.yaml").unlink()  # killed at its start, before config.yaml was written
    train.main([*words, "--max_steps", "1", "--output_dir", str(inside), *LATEST])
    # Room for weights and gradients, but not for the optimizer states.
    monkeypatch.setattr(fitting, "device_bytes", lambda _: 200_000)
    with pytest.raises(
        ConfigError,
        match="auto: not one sample of 32 tokens .the longest row's. fits: .* below 32,",
    ):
        train.main([*words, "--output_dir", str(tmp_path / "none")])
    with pytest.raises(
        ConfigError, match="auto: given together with gradient_accumulation_steps=2"
    ):
        train.main([*words, "--global_batch_size", "none", "--gradient_accumulation_steps", "2"])


# Hand-over


def test_onnx(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With other numbers of rows and tokens than at the export, the ONNX file gives the model's scores."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
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
    assert b".py" not in (tmp_path / "out/model.onnx").read_bytes()  # no local source files
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


def test_onnx_beside_its_weights(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights too large for one protobuf go to model.onnx.data."""
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    from transformers import AutoTokenizer

    from accel_ft.model import onnx

    train.main([*words, "--max_steps", "1"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    tokenizer.add_tokens([f"new{number}" for number in range(1000)])  # more than the model has
    tokenizer.save_pretrained(tmp_path / "run/model")
    monkeypatch.setattr(onnx, "LARGEST", 1000)
    out = tmp_path / "out"
    export.main(["--checkpoint", str(tmp_path / "run"), "--output", str(out), "--format", "onnx"])
    assert (out / "model.onnx.data").stat().st_size > 1000


def test_onnx_of_other_kinds(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BART, which compares the numbers of end tokens in a batch, is exported; a failure is reported in one line."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from transformers import BartConfig, BartForSequenceClassification

    from accel_ft.model.load import load_tokenizer
    from accel_ft.model.onnx import write_onnx

    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    config = BartConfig(vocab_size=60, d_model=16, eos_token_id=3, pad_token_id=0, **layers)
    model, tokenizer = BartForSequenceClassification(config).eval(), load_tokenizer(str(tiny_model))
    assert write_onnx(model, tokenizer, tmp_path) < 1e-4
    # Outputs may be large, as in a regression: the tolerance is relative.
    with monkeypatch.context() as patch:
        patch.setattr("accel_ft.model.onnx.TOLERANCE", 1e-5)
        model.classification_head.out_proj.weight.data *= 1e5
        assert write_onnx(model, tokenizer, tmp_path) > 1e-5
    with monkeypatch.context() as patch:
        nothing = [np.full((1, 1), np.nan, np.float32)]
        patch.setattr("onnxruntime.InferenceSession.run", lambda *_: nothing)
        with pytest.raises(UserError, match="its logits differ by nan from the model's"):
            write_onnx(model, tokenizer, tmp_path)
        patch.setattr("onnxruntime.InferenceSession.run", lambda *_: 1 / 0)
        with pytest.raises(UserError, match="onnxruntime cannot run Bart.*: division by zero"):
            write_onnx(model, tokenizer, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator\nfile an issue")

    monkeypatch.setattr("torch.onnx.export", fail)
    with pytest.raises(UserError, match="BartForSequenceClassification as ONNX: no such operator$"):
        write_onnx(model, tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("end", "padding"), [("[SEP]", None), ("[UNK]", None), ("[SEP]", 0), ("[SEP]", -1)]
)
def test_a_decoder_whose_tokenizer_has_no_pad_token(
    end: str, padding: int | None, tiny_model: Path, tmp_path: Path
) -> None:
    """GPT-2 classifies at a text's last token: in a padded batch, each text scores as in a batch of one, also if
    every text ends in the end token.
    """
    from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token = end, "[CLS]", None
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=1.0,
        num_labels=3,
    )
    assert config.pad_token_id is None
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval()
    model.config.pad_token_id = padding
    model.save_pretrained(tmp_path)
    model.config.pad_token_id = None
    tokenizer.save_pretrained(tmp_path)
    texts = ["goal", "bank of the league", "the a of in goal striker coach"]
    found = load_classifier(tmp_path, all_scores=True).predict(texts)
    for text, each in zip(texts, found, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        scores = model(input_ids=ids).logits.softmax(-1)[0].tolist()
        assert list(each["scores"].values()) == pytest.approx(scores, abs=1e-5)


def test_a_model_too_large_to_be_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_ft.engine import fitting

    monkeypatch.setattr(fitting, "device_bytes", lambda device: 1000)
    with pytest.raises(
        ConfigError, match="auto: the whole model, 0 MiB, and its gradients must fit"
    ):
        train.main([*words, "--per_device_train_batch_size", "auto"])


def test_a_head_keeps_its_labels(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier is trained further: it keeps its order of the labels if the rows have the same, or gets theirs."""
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
    told = capsys.readouterr().err
    kept = "is kept, though it was trained for other labels: a -> Business, b -> Sci/Tech"
    assert told.count(kept) == 1
    assert "lacks them, or has them for another number of labels (a resume loads them)" in told


def test_an_export_that_could_not_take_its_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "out")
    with pytest.raises(ConfigError, match="is a mount point. Fix: a folder in it"):
        export.main(["--checkpoint", "x", "--output", str(tmp_path / "out")])


def test_an_export_among_checkpoints(words: list[str], tmp_path: Path) -> None:
    """Inside a checkpoint it would make that one damaged; beside the checkpoints it would pass for the newest."""
    train.main([*words, "--max_steps", "1"])
    checkpoint = tmp_path / "run/checkpoints/step_00000001"
    for output in (checkpoint / "hf", checkpoint / "a/b", checkpoint.with_name("step_00000009")):
        with pytest.raises(ConfigError, match="is inside checkpoints/. Fix: another folder"):
            export.main(["--checkpoint", str(checkpoint), "--output", str(output)])
    (tmp_path / "checkpoints").mkdir()  # not a run's
    (tmp_path / "manifest.json").write_text("{}")  # e.g. a web site's
    export.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "checkpoints/hf")])


def test_an_export_keeps_the_kind_of_weights(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=4)
    model.bfloat16().save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "half")
    export.main(["--checkpoint", str(tmp_path / "half"), "--output", str(tmp_path / "out")])
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("half", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {value.dtype for value in after.values()} == {torch.bfloat16}


def test_an_export_of_a_model_that_is_not_whole(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--max_steps", "1"])
    weights = load_file(tmp_path / "run/model/model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, tmp_path / "run/model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="weights are missing: .'classifier.weight'."):
        export.main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_folders_without_a_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--reproduce .` and `--output .` mean the current folder."""
    train.main([*words, "--max_steps", "2"])
    monkeypatch.chdir(tmp_path / "run")
    train.main(["--reproduce", "."])
    assert (tmp_path / "run_again/model").is_dir()
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    export.main(["--checkpoint", "../run", "--output", "."])
    assert (tmp_path / "new/model.safetensors").is_file()


def test_a_folder_is_no_model_of_the_hub_from_elsewhere(
    words: list[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a relative path does not exist, it looks like a Hub id: the card must not name it as base_model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "nets/tiny")
    train.main([*words, "--model_name_or_path", "nets/tiny", "--max_steps", "1"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export.main(["--checkpoint", str(tmp_path / "run"), "--output", "out"])
    assert "base_model" not in Path("out/README.md").read_text()


def test_export_of_a_sharded_classifier(words: list[str], tmp_path: Path) -> None:
    """In several files, like large models on the Hub."""
    from transformers import AutoModelForSequenceClassification

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

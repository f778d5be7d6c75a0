"""Multi-label classification, regression and pairs of texts: trained, measured, predicted, resumed."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FILLING, WORDS, cut_off, events_of, job_words, run_hash

from accel_ft import evaluate, export, load_classifier, predict, train
from accel_ft.config import DataConfig
from accel_ft.data.loader import Padding
from accel_ft.data.sources import file_source
from accel_ft.data.tokenize import tokenize
from accel_ft.engine.step import weighted_loss
from accel_ft.errors import ConfigError, DataError
from accel_ft.metrics import best_thresholds, regression_metrics, score
from accel_ft.model.load import load_tokenizer

LABELS = list(WORDS)
LEARNING = [
    "--report_to",
    "html",
    "--num_train_epochs",
    "40",
    "--learning_rate",
    "5e-3",
    "--save_steps",
    "1000",
]


def several(path: Path, count: int, seed: int) -> Path:
    """Write texts with words of 0 to 3 classes, labelled with these classes."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        labels = sorted(rng.sample(LABELS, k=number % 4))
        words = rng.choices(FILLING, k=4) + [
            w for label in labels for w in rng.choices(WORDS[label], k=3)
        ]
        rng.shuffle(words)
        rows.append({"text": " ".join(words), "label": labels})
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                [["text", "label"], *([row["text"], "; ".join(row["label"])] for row in rows)]
            )
    return path


def numbers(path: Path, count: int, seed: int) -> Path:
    """Write texts with words of one class, labelled with a number that stands for the class."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(count):
            label = rng.choice(LABELS)
            words = [*rng.choices(FILLING, k=5), *rng.choices(WORDS[label], k=3)]
            writer.writerow([" ".join(words), f"{LABELS.index(label) - 1.5}"])
    return path


def pairs(path: Path, count: int, seed: int) -> Path:
    """Write pairs of texts on two topics, labelled with the topic of the second."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "label"])
        for number in range(count):
            topics = LABELS[:2] if number % 2 else LABELS[1::-1]
            texts = [" ".join(rng.choices(WORDS[topic], k=3)) for topic in topics]
            writer.writerow([*texts, topics[1]])
    return path


def job(model: Path, train_file: Path, eval_file: Path, folder: Path, *words: str) -> list[str]:
    return [*job_words(model, train_file, eval_file, folder), *words]


# Several labels


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_several_labels(
    suffix: str, tmp_path: Path, still_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists in jsonl and text with a separator in csv are the same rows; a row may have no label."""
    rows, held_out = (
        several(tmp_path / f"train{suffix}", 48, 0),
        several(tmp_path / f"test{suffix}", 24, 1),
    )
    words = job(
        still_model,
        rows,
        held_out,
        tmp_path / "run",
        "--problem_type",
        "multi_label_classification",
        "--label_separator",
        ";",
        *LEARNING,
        "--num_train_epochs",
        "25",
    )
    train.main(words)
    events = events_of(tmp_path / "run")
    test = next(e for e in events if e["event"] == "test")
    assert test["test_f1_macro"] > 0.7
    assert events[0]["loss"] == pytest.approx(np.log(2), abs=0.1)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert len(config["thresholds"]) == 4
    newest = max((tmp_path / "run/checkpoints").iterdir())
    capsys.readouterr()
    export.main(["--checkpoint", str(newest), "--output", str(tmp_path / "early")])
    assert f"{newest.name} has no tuned thresholds yet" in capsys.readouterr().err
    export.main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "whole")])
    assert "thresholds" not in capsys.readouterr().err
    classify = load_classifier(tmp_path / "run", all_scores=True)
    several_columns = DataConfig(problem_type="multi_label_classification", label_separator=";")
    texts, meant = zip(
        *(
            (text, json.loads(cell))
            for _, text, cell in file_source(held_out).rows(several_columns)
        ),
        strict=True,
    )
    found = classify.predict(texts)
    right = np.mean([each["labels"] == labels for each, labels in zip(found, meant, strict=True)])
    assert right == pytest.approx(test["test_accuracy"])
    assert right > 0.25
    assert found[0]["scores"].keys() == set(LABELS)
    capsys.readouterr()
    evaluate.main(["--checkpoint", str(tmp_path / "run")])
    again = json.loads(capsys.readouterr().out)
    assert again["f1_macro"] == pytest.approx(test["test_f1_macro"])
    assert again["accuracy"] == pytest.approx(test["test_accuracy"])
    from transformers import pipeline

    pipe = pipeline("text-classification", model=str(tmp_path / "run/model"), top_k=None)
    theirs = {each["label"]: each["score"] for each in pipe(texts[0])[0]}
    assert theirs == pytest.approx(found[0]["scores"], abs=1e-4)  # it applies the sigmoid, too
    page = (tmp_path / "run/report.html").read_text()
    assert "reliability diagram" in page
    assert "confusion matrix" not in page
    cells = re.findall(r"<td>([\w/]+)</td><td>\d+</td>\s*<td>(\d\.\d{3})</td>", page)
    assert cells == [
        (config["id2label"][str(place)], f"{value:.3f}")
        for place, value in enumerate(config["thresholds"])
    ]


def test_the_best_of_several_labels_is_the_one_that_is_delivered(
    tmp_path: Path, still_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best is chosen with tuned thresholds; a checkpoint that is evaluated directly has thresholds of 0.5."""
    rows, held_out = (several(tmp_path / f"{n}.jsonl", 24, n) for n in range(2))
    words = job(still_model, rows, held_out, tmp_path / "run", "--load_best_model_at_end")
    words += ["--problem_type", "multi_label_classification", "--eval_steps", "2", "--seed", "1"]
    words += ["--save_steps", "2", "--save_total_limit", "none", "--learning_rate", "2e-3"]
    words += ["--validation_file", str(held_out), "--num_train_epochs", "12"]
    train.main(words)
    evals = [event for event in events_of(tmp_path / "run") if event["event"] == "eval"]
    end = events_of(tmp_path / "run")[-1]
    tuned = {}
    for event in evals:
        step = f"step_{event['step']:08d}"
        classify = load_classifier(tmp_path / "run/checkpoints" / step, all_scores=True)
        lines = [json.loads(line) for line in held_out.read_text().splitlines()]
        found = classify.predict([line["text"] for line in lines])
        names = sorted(LABELS)
        chances = np.array([[each["scores"][name] for name in names] for each in found])
        labels = np.array([[name in line["label"] for name in names] for line in lines], np.float32)
        logits = np.log(chances / (1 - chances))
        tuned[event["step"]] = score(logits, labels, names, best_thresholds(logits, labels))[
            "f1_macro"
        ]
    assert end["model_step"] == max(tuned, key=tuned.get)
    capsys.readouterr()
    evaluate.main(["--checkpoint", str(tmp_path / "run/checkpoints" / step)])
    plain = score(logits, labels, names)["f1_macro"]
    assert plain != pytest.approx(tuned[event["step"]], abs=1e-6)
    assert json.loads(capsys.readouterr().out)["f1_macro"] == pytest.approx(plain, abs=1e-6)
    assert end["eval_f1_macro"] == pytest.approx(max(tuned.values()), abs=1e-6)
    assert {e["step"]: e["eval_f1_macro"] for e in evals} == pytest.approx(tuned, abs=1e-6)


def test_thresholds() -> None:
    """a is separable at 0.2; b is absent and stays at 0.5; c has ties, which a threshold cannot split."""
    chances = np.array([[0.1, 0.9, 0.6], [0.15, 0.9, 0.6], [0.25, 0.1, 0.6], [0.3, 0.2, 0.1]])
    logits = np.log(chances / (1 - chances))
    labels = np.array([[0, 0, 1], [0, 0, 0], [1, 0, 1], [1, 0, 0]], np.float32)
    found = best_thresholds(logits, labels)
    assert found == pytest.approx([0.2, 0.5, 0.35])
    tuned, plain = (score(logits, labels, list("abc"), t) for t in (found, None))
    assert tuned["per_class"]["a"]["f1"] == 1.0
    assert plain["per_class"]["a"]["f1"] == 0.0
    assert tuned["per_class"]["c"]["f1"] == pytest.approx(0.8)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(logits), torch.tensor(labels, dtype=torch.float64)
    )
    assert tuned["loss"] == pytest.approx(expected.item())
    assert plain["accuracy"] == 0.0
    assert tuned["accuracy"] == 0.5


def test_losses_are_those_of_transformers(tiny_model: Path) -> None:
    """`weighted_loss` is a sum over the rows: divided by their number, it is the model's own loss."""
    from transformers import AutoModelForSequenceClassification

    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 8, 3]])
    ones = torch.ones(2)
    for problem_type, count, labels in (
        ("single_label_classification", 4, torch.tensor([1, 3])),
        ("multi_label_classification", 4, torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 0]])),
        ("regression", 1, torch.tensor([0.5, -2.0])),
    ):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            tiny_model, num_labels=count, problem_type=problem_type
        ).eval()
        theirs = model(input_ids=ids, labels=labels)
        assert weighted_loss(theirs.logits, labels, ones, 0.0).item() / 2 == pytest.approx(
            theirs.loss.item()
        )


def test_only_what_thresholds_decide_is_said_to_be_tuned(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = several(tmp_path / "train.jsonl", 20, 0)
    words = job(
        tiny_model, rows, rows, tmp_path / "run", "--problem_type", "multi_label_classification"
    )
    for metric, tuned in (("f1_macro", " (thresholds are tuned on them)"), ("roc_auc", "")):
        more = ["--metric_for_best_model", metric, "--load_best_model_at_end"]
        train.main([*words, *more, "--max_steps", "1", "--output_dir", str(tmp_path / metric)])
        told = capsys.readouterr().out
        assert re.search(
            rf"^{metric} on the validation rows: [\d.]+{re.escape(tuned)}$", told, re.M
        )


def test_several_labels_resume(tmp_path: Path, tiny_model: Path) -> None:
    rows = several(tmp_path / "train.jsonl", 20, 0)
    words = job(
        tiny_model, rows, rows, tmp_path / "run", "--problem_type", "multi_label_classification"
    )
    train.main(words)
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 3)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert run_hash(tmp_path / "run") == whole


def test_a_list_that_pandas_wrote_as_text(tmp_path: Path, tiny_model: Path) -> None:
    """Its brackets would become part of the labels."""
    bad = tmp_path / "bad.csv"
    bad.write_text(
        "text,label\na,\"['World', 'Sports']\"\nb,\"['World']\"\nc,[]\nd,\"[0, 2]\"\ne,\"('x', 'y')\"\n"
    )
    words = job(tiny_model, bad, bad, tmp_path / "run")
    with pytest.raises(DataError, match="5 faulty rows(.|\n)*not a list of different labels"):
        train.main([*words, "--problem_type", "multi_label_classification"])


def test_a_row_of_zeros_and_ones(tmp_path: Path, tiny_model: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(f'{{"text": "a", "label": {each}}}\n' for each in ([0, 1], [1, 0])))
    words = job(tiny_model, bad, bad, tmp_path / "run")
    with pytest.raises(DataError, match="every row has the labels .*a classifier needs two labels"):
        train.main([*words, "--problem_type", "multi_label_classification"])


def test_thresholds_of_another_job(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier with tuned thresholds is trained further: checkpoints of the new run do not inherit them."""
    from accel_ft.checkpoint.open import open_classifier

    rows = several(tmp_path / "train.jsonl", 40, 0)
    poor = several(tmp_path / "poor.jsonl", 1, 0)  # a row without a label
    words = job(tiny_model, rows, poor, tmp_path / "run", "--max_steps", "1")
    words += ["--problem_type", "multi_label_classification"]
    train.main(words)
    assert "the validation rows (1) hold 0 of the 4 labels" in capsys.readouterr().err
    model = tmp_path / "run/model"
    assert open_classifier(str(model), torch.device("cpu")).thresholds is not None
    assert "is ignored here" not in capsys.readouterr().err
    for variable, value in (("DYNAMO_BACKEND", "INDUCTOR"), ("USE_FSDP", "true")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"ACCELERATE_{variable}", value)
            open_classifier(str(model), torch.device("cpu"))
        assert capsys.readouterr().err.count("is ignored here") == 1
    more = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path / "on")]
    train.main([*words, *more])
    (checkpoint,) = (tmp_path / "on/checkpoints").iterdir()
    assert open_classifier(str(checkpoint), torch.device("cpu")).thresholds is None


def test_a_label_that_training_does_not_know(tmp_path: Path, tiny_model: Path) -> None:
    rows = several(tmp_path / "train.jsonl", 20, 0)
    (tmp_path / "bad.jsonl").write_text(
        '{"text": "a", "label": ["World", "Sport"]}\n{"text": "b", "label": 7}\n'
    )
    words = job(
        tiny_model,
        rows,
        tmp_path / "bad.jsonl",
        tmp_path / "run",
        "--problem_type",
        "multi_label_classification",
    )
    with pytest.raises(DataError, match="line 2: label is 7, not a list of different labels"):
        train.main(words)
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": ["World", "Sport"]}\n')
    with pytest.raises(
        DataError, match="line 1: label 'Sport' is none of these.*Did you mean `Sports`"
    ):
        train.main(words)


# A number


def test_regression(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, held_out = numbers(tmp_path / "train.csv", 48, 0), numbers(tmp_path / "test.csv", 24, 1)
    words = job(
        tiny_model, rows, held_out, tmp_path / "run", "--problem_type", "regression", *LEARNING
    )
    train.main([*words, "--load_best_model_at_end", "--eval_steps", "20"])
    events = events_of(tmp_path / "run")
    test = next(e for e in events if e["event"] == "test")
    assert test["test_rmse"] < 0.6  # 1.1 by guessing the mean
    assert test["test_pearson"] > 0.9
    evals = {e["step"]: e["eval_rmse"] for e in events if e["event"] == "eval"}
    assert events[-1]["model_step"] == min(evals, key=evals.get)
    assert "rmse on the test rows" in capsys.readouterr().out
    text = "the of on for in software orbit genome"
    found = load_classifier(tmp_path / "run").predict(
        [text, "in a the to for treaty minister border"]
    )
    assert found[0].keys() == {"score"}
    assert found[0]["score"] > found[1]["score"] + 0.7  # 1.5 and -1.5 if fully learnt
    predict.main(["--checkpoint", str(tmp_path / "run"), "--text", text])
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(
        found[0]["score"], abs=1e-5
    )
    mistakes = [
        json.loads(line) for line in (tmp_path / "run/mistakes.jsonl").read_text().splitlines()
    ]
    assert mistakes[0]["error"] == pytest.approx(
        abs(mistakes[0]["label"] - mistakes[0]["predicted"]), abs=1e-5
    )
    assert "predictions over labels" in (tmp_path / "run/report.html").read_text()


def test_regression_metrics() -> None:
    found = regression_metrics(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 3.0], np.float32))
    assert found == pytest.approx(
        {
            "loss": 2 / 3,
            "rmse": (2 / 3) ** 0.5,
            "mae": 2 / 3,
            "pearson": 0.7559289,
            "spearmanr": 0.8660254,  # ranks 1 2 3 and 1 2.5 2.5
            "r2": 0.25,
        }
    )
    flat = regression_metrics(np.ones(3), np.ones(3, np.float32))
    assert (flat["pearson"], flat["spearmanr"], flat["r2"]) == (0.0, 0.0, 0.0)
    ties = regression_metrics(np.array([1.0, 2.0, 2.0, 4.0]), np.arange(1, 5, dtype=np.float32))
    assert ties["spearmanr"] == pytest.approx(4.5 / (4.5 * 5) ** 0.5)  # ranks 1 2.5 2.5 4
    diverged = regression_metrics(np.array([1.0, np.nan, 2.0]), np.ones(3, np.float32) * [1, 2, 3])
    assert np.isnan(diverged["spearmanr"])
    assert np.isnan(diverged["pearson"])


def test_what_is_no_number(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "bad.csv").write_text("text,label\na,1.5\nb,nan\nc,high\n")
    words = job(
        tiny_model,
        tmp_path / "bad.csv",
        tmp_path / "bad.csv",
        tmp_path / "run",
        "--problem_type",
        "regression",
    )
    with pytest.raises(
        DataError, match='line 3: label is "nan", not a finite number.*\n.*line 4: label is "high"'
    ):
        train.main(words)


def test_keys_that_are_for_classes_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train.main(
            [
                "--problem_type",
                "regression",
                "--metric_for_best_model",
                "accuracy",
                "--class_weights",
                "balanced",
            ]
        )
    assert (
        "metric_for_best_model=accuracy: is no metric of regression. Allowed: rmse, mae, pearson, spearmanr, r2, loss"
        in str(caught.value)
    )
    assert "class_weights=balanced: is for single_label_classification only" in str(caught.value)


# Pairs


def test_pairs(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only token types and positions tell which text is the second one."""
    rows, held_out = pairs(tmp_path / "train.csv", 200, 0), pairs(tmp_path / "test.csv", 40, 1)
    columns = ["--text_column", "first", "--text_pair_column", "second"]
    words = job(
        tiny_model,
        rows,
        held_out,
        tmp_path / "run",
        *columns,
        *LEARNING,
        "--num_train_epochs",
        "12",
    )
    train.main(words)
    test = next(e for e in events_of(tmp_path / "run") if e["event"] == "test")
    assert test["test_accuracy"] > 0.9
    classify = load_classifier(tmp_path / "run")
    asked = [
        ("goal striker medal", "border election troops"),
        ("treaty border embassy", "goal striker medal"),
    ]
    assert [each["label"] for each in classify.predict(asked)] == ["World", "Sports"]
    with pytest.raises(DataError, match="trained on pairs"):
        classify.predict(["goal striker medal"])
    shutil.copytree(tmp_path / "run/model", tmp_path / "alone")  # without the run's config.yaml
    alone = load_classifier(tmp_path / "alone")
    assert alone.predict([]) == []
    assert [each["label"] for each in alone.predict(asked)] == ["World", "Sports"]
    with pytest.raises(ConfigError, match="trained on pairs of texts. Fix: two texts per row"):
        alone.predict(["goal striker medal"])
    with pytest.raises(ConfigError, match="trained on pairs of texts. Fix: two texts per row"):
        predict.main(["--checkpoint", str(tmp_path / "alone"), "--text", "goal striker medal"])
    measured = ["--checkpoint", str(tmp_path / "alone"), "--test_file", str(held_out), *columns]
    with pytest.raises(ConfigError, match="alone: was trained on pairs of texts. Fix: two texts"):
        evaluate.main(measured[:-2])  # would read the first texts only
    capsys.readouterr()
    evaluate.main([*measured, "--output", "-"])
    assert json.loads(capsys.readouterr().out)["accuracy"] == test["test_accuracy"]  # printed once
    predict.main(
        [
            "--checkpoint",
            str(tmp_path / "run"),
            "--input",
            str(held_out),
            "--output",
            str(tmp_path / "out.jsonl"),
        ]
    )
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    labels = [line.rpartition(",")[2] for line in held_out.read_text().splitlines()[1:]]
    share = np.mean([line["label"] == label for line, label in zip(lines, labels, strict=True)])
    assert share == pytest.approx(test["test_accuracy"])
    capsys.readouterr()
    predict.main(
        [
            "--checkpoint",
            str(tmp_path / "run"),
            "--text",
            "goal striker medal",
            "--text_pair",
            "border election troops",
        ]
    )
    assert json.loads(capsys.readouterr().out)["label"] == "World"
    with pytest.raises(DataError, match="text_pair_column=third: no such column"):
        predict.main(
            [
                "--checkpoint",
                str(tmp_path / "run"),
                "--input",
                str(held_out),
                "--text_pair_column",
                "third",
            ]
        )


def test_token_types(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "p.csv").write_text("text,other,label\ngoal,bank the,x\nthe,,y\n")
    store = tokenize(
        file_source(tmp_path / "p.csv"),
        DataConfig(text_pair_column="other", max_seq_length=8),
        load_tokenizer(str(tiny_model)),
    )
    first, second = store.tokens(0), store.tokens(1)
    assert first[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert second[1].tolist() == [0, 0, 0, 1]
    assert store.lengths(np.arange(2)).tolist() == [6, 4]
    batch = Padding(load_tokenizer(str(tiny_model)), 8, torch.device("cpu"))([first, second])
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="a pair of texts has 3 special tokens"):
        tokenize(
            file_source(tmp_path / "p.csv"),
            DataConfig(text_pair_column="other", max_seq_length=2),
            load_tokenizer(str(tiny_model)),
        )
    plain = tokenize(
        file_source(tmp_path / "p.csv"),
        DataConfig(max_seq_length=8),
        load_tokenizer(str(tiny_model)),
    )
    assert len(plain.tokens(0)) == 1


def test_amounts_that_are_taken_for_labels_are_told(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"row {n},{n % 3 / 2}\n" for n in range(40)))
    for name in ("train", "validation", "test"):
        words += [f"--{name}_file", str(rows)]
    train.main([*words, "--max_steps", "1"])
    told = capsys.readouterr().err
    assert "the labels are numbers (0.0, ...), and each counts as a class. Fix" in told

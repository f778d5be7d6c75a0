"""The report, what differs between two runs, and a run done again."""

import csv
import json
import re
import shutil
from html import escape
from pathlib import Path

import numpy as np
import pytest
from conftest import LATEST, cut_off, events_of, run, stopped_at, write_rows
from safetensors.torch import load_file, save_file

from accel_ft import report, train
from accel_ft.config import TrainConfig
from accel_ft.errors import ConfigError, UserError
from accel_ft.metrics import cross_entropy
from accel_ft.reporting import report as report_module

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_report(words: list[str], tmp_path: Path, rows_file: Path) -> None:
    """Texts and labels are escaped; the test metrics are shown; several runs share each figure."""

    from accel_ft.reporting import figures
    from accel_ft.reporting.record import read_record

    evil = tmp_path / "evil.csv"
    with evil.open("w", newline="") as file:
        rows = [
            ["<script>alert(1)</script> goal", "<b>Sports</b>"],
            ["bank $x_1$", "A & B 体育"],
        ] * 8
        csv.writer(file).writerows([["text", "label"], *rows])
    words += ["--train_file", str(evil), "--validation_file", str(evil), "--test_file", str(evil)]
    words += ["--report_to", "html"]
    train.main(words)
    run = tmp_path / "run"
    page = (run / "report.html").read_text()
    mistake = '<td class="text">&lt;script&gt;alert(1)&lt;/script&gt; goal</td>'
    assert mistake in page or '<td class="text">bank $x_1$</td>' in page
    assert re.search(r'\d\.\d{3} <span class="range">\d\.\d{3}.\d\.\d{3}</span>', page)
    assert re.search(r"<td>4</td><td>save</td><td>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d</td>", page)
    assert "<td>learning_rate</td><td><pre>0.001</pre>" in page
    assert "<td>sample order sha256</td>" in page
    assert "<script>" not in page
    assert "<b>Sports" not in page
    assert "&lt;b&gt;Sports&lt;/b&gt;" in page
    assert '<th class="up">A &amp; B 体育</th>' in page  # as text, in the browser's fonts
    assert "http" not in page.replace("http-equiv", "")  # self-contained
    assert {path.stem for path in (run / "report").iterdir()} == {
        "train_loss", "train_learning_rate", "train_grad_norm", "train_samples_per_second",
        "eval_loss", "eval_accuracy", "eval_f1_macro", "eval_matthews_correlation", "eval_roc_auc",
        "confusion_0", "reliability_0",
    }  # fmt: skip
    with np.load(run / "predictions.npz") as saved:
        accuracy = float((saved["logits"].argmax(1) == saved["labels"]).mean())
        losses = cross_entropy(saved["validation_logits"], saved["validation_labels"])
        assert saved["validation_rows"].tolist() == list(range(len(losses)))
    assert accuracy == pytest.approx(events_of(run)[-2]["test_accuracy"])
    assert float(losses.mean()) == pytest.approx(events_of(run)[-1]["eval_loss"])
    mistakes = [json.loads(line) for line in (run / "mistakes.jsonl").read_text().splitlines()]
    assert len(mistakes) == round(16 * (1 - accuracy))
    assert all(each["label"] != each["predicted"] for each in mistakes)
    train.main([*words, "--output_dir", str(tmp_path / "other"), "--seed", "1"])
    predicted = np.repeat([0, 1, 0, 1], [9, 3, 1, 3])
    np.savez(
        run / "predictions.npz",
        logits=3 * np.eye(2, dtype=np.float32)[predicted],
        labels=np.repeat([0, 1], [12, 4]),
        rows=np.arange(16),
    )
    report.main([str(run)])
    page = (run / "report.html").read_text()
    cells = re.findall(r'(\d\.\d{3}) <span class="range">', page)
    assert cells == ["0.900", "0.750", "0.818", "0.500", "0.750", "0.600"]  # precision, recall, F1
    counts = re.findall(r'%\)">(?:<span style="color: #fff">)?(\d+)', page)
    assert counts == ["9", "3", "1", "3"]  # one table row per true label
    assert "<td>end</td>" in page
    report.main([str(run), str(tmp_path / "other"), "--output", str(tmp_path / "both")])
    page = (tmp_path / "both/report.html").read_text()
    assert "<h2>run</h2>" in page
    assert "<h2>other</h2>" in page
    records = [read_record(folder) for folder in (run, tmp_path / "other")]
    assert {len(figure.axes[0].lines) for figure in figures.curves(records).values()} == {2}


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_in_a_browser(width: int, words: list[str], tmp_path: Path) -> None:
    """It fits a phone and a laptop, shows every picture, and the console stays empty."""
    train.main([*words, "--report_to", "html"])
    page = (tmp_path / "run/report.html").read_text()
    (tmp_path / "frame.html").write_text(
        f'''<iframe id="frame" width="{width}" height="800" style="border: 0" srcdoc="{escape(page)}"></iframe>
        <script>onload = () => {{
            const page = frame.contentDocument, shown = [...page.images].filter(image => image.naturalWidth > 99);
            const root = page.documentElement, wider = root.scrollWidth - root.clientWidth;
            document.title = [wider, page.images.length, shown.length].join();
        }}</script>'''
    )
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=10000"]
    done = run(BROWSER, *words, "--dump-dom", tmp_path / "frame.html")
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>(\d+),(\d+),(\d+)</title>", done.stdout)
    assert found is not None
    pictures = page.count("<img ")
    assert pictures > 8
    assert [int(number) for number in found.groups()] == [0, pictures, pictures]


def test_long_texts_are_shortened_in_the_report(words: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "long.csv"
    texts = [f"begins {'word ' * 1000}ends,{label}" for label in ("A", "B")]
    rows.write_text("\n".join(["text,label", *texts * 4]))
    words += ["--train_file", str(rows), "--validation_file", str(rows), "--test_file", str(rows)]
    train.main([*words, "--max_steps", "1", "--report_to", "html"])
    page = (tmp_path / "run/report.html").read_text()
    cells = re.findall('<td class="text">(.*?)</td><td>', page)
    assert {len(cell) for cell in cells} == {2004}
    assert cells[0].endswith(" ...")
    kept = json.loads((tmp_path / "run/mistakes.jsonl").read_text().splitlines()[0])
    assert kept["text"].endswith("ends")
    assert report_module._shortened(["a", "b" * 3000]) == ["a", "b" * 2000 + " ..."]


def test_a_report_of_runs_of_one_name_and_of_one_that_goes_on(
    words: list[str], tmp_path: Path
) -> None:

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
    assert "<th>accuracy</th>" in page  # though the first run was never evaluated
    cut_off(folders[1], 6)
    with pytest.raises(RuntimeError):
        stopped_at(8, [*words, "--output_dir", str(folders[1]), *LATEST])
    assert not (folders[1] / "predictions.npz").exists()  # they described the removed model
    assert not (folders[1] / "mistakes.jsonl").exists()


def test_what_a_rewound_log_keeps(tmp_path: Path) -> None:
    """When and why a run was resumed and stopped is kept, even after the update from which it now continues."""
    from accel_ft.runtime.logging import EventLog

    log = EventLog(tmp_path / "metrics.jsonl", writes=True)
    for step, event in enumerate(["train", "resume", "train", "preempted", "save", "end"], start=1):
        log.write(event, step)
    log.write("nonfinite", 7, policy="stop")
    log.write("nonfinite", 7, policy="skip")
    log.write("eval", 8, eval_loss=float("nan"), eval_per_class={"a": {"f1": float("inf")}})
    last = log.path.read_text().splitlines()[-1]  # JSON has no NaN
    nulls = {"eval_loss": None, "eval_per_class": {"a": {"f1": None}}}
    assert json.loads(last, parse_constant=pytest.fail) == {"event": "eval", "step": 8, **nulls}
    assert np.isnan(TrainConfig(metric_for_best_model="loss").best_value(nulls, "eval_"))
    log.rewind(1)
    kept = [(event["step"], event["event"]) for event in events_of(tmp_path)]
    assert kept == [(1, "train"), (2, "resume"), (4, "preempted"), (7, "nonfinite")]
    log.path.unlink()
    # The evaluation of update 2 was interrupted; the next start redid it, and was killed.
    for step in (1, 2):
        log.write("eval", step)
    log.rewind(2)
    assert len(events_of(tmp_path)) == 2
    log.rewind(2, eval_is_due=True)
    assert [event["step"] for event in events_of(tmp_path)] == [1]


def test_a_report_of_many_labels_lists_the_commonest_confusions(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"word {number},label_{number:02}" for number in range(31)] * 2
    (tmp_path / "many.csv").write_text("\n".join(["text,label", *rows]))
    for key in ("train", "validation", "test"):
        words += [f"--{key}_file", str(tmp_path / "many.csv")]
    train.main([*words, "--max_steps", "1"])
    labels = np.repeat(np.arange(31), 4)
    predicted = labels.copy()
    predicted[[8, 9, 10, 5]] = [0, 0, 0, 30]
    logits = np.eye(31, dtype=np.float32)[predicted]
    np.savez(tmp_path / "run/predictions.npz", logits=logits, labels=labels, rows=np.arange(124))
    report.main([str(tmp_path / "run")])
    page = (tmp_path / "run/report.html").read_text()
    assert "Rows of each label by prediction" not in page
    found = re.findall(r"<td>(label_\d+)</td><td>(label_\d+)</td><td>(\d+)</td><td>(\d+) %", page)
    assert found == [("label_02", "label_00", "3", "75"), ("label_01", "label_30", "1", "25")]
    assert (tmp_path / "run/report/confusion_0.png").exists()
    shutil.rmtree(tmp_path / "run/report")
    monkeypatch.setattr("accel_ft.reporting.report.DRAWN_AT_MOST", 30)  # a C x C picture
    report.main([str(tmp_path / "run")])
    assert not (tmp_path / "run/report/confusion_0.png").exists()
    assert "commonest confusions" in (tmp_path / "run/report.html").read_text()


def test_curves_of_runs_that_measure_otherwise(tmp_path: Path) -> None:
    from accel_ft.reporting import figures
    from accel_ft.reporting.record import Record

    runs = [
        Record(name, {}, {}, [{"event": "eval", "step": 1, f"eval_{name}": 0.5}], {}, [])
        for name in ("mse", "accuracy")
    ]
    runs[0].events.insert(0, {"event": "eval", "step": 0, "eval_mse": None})  # NaN when logged
    drawn = figures.curves(runs)
    assert {"eval_mse", "eval_accuracy"} <= set(drawn)


def test_a_report_of_no_run(tmp_path: Path) -> None:

    with pytest.raises(ConfigError, match="holds no run of accel_ft"):
        report.main([str(tmp_path)])
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"receipt.json\). Did you mean `run`"):
        report.main([str(tmp_path / "runs")])
    for name in ("config.yaml", "receipt.json"):
        (run / name).touch()
    with pytest.raises(ConfigError, match=rf"model: holds no run .*\). Fix: {run}$"):
        report.main([str(run / "model")])
    (tmp_path / "receipt.json").touch()
    with pytest.raises(ConfigError, match="receipt.json: cannot be read"):
        report.main([str(tmp_path)])


def test_calibration_and_intervals() -> None:
    from accel_ft.reporting.record import calibration, intervals

    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, True, True, False, True, False])
    rows, error = calibration(confidence, correct)
    assert rows.tolist() == pytest.approx(np.array([[0.55, 0.5, 1 / 3], [0.95, 0.75, 2 / 3]]))
    assert error == pytest.approx(0.05 / 3 + 0.2 * 2 / 3)
    spread = intervals(hits=90, present=100, predicted=90, total=200)
    score, low, high = spread["recall"]
    assert score == 0.9
    assert 0.82 < low < 0.87  # exact binomial: 0.824-0.951
    assert 0.93 < high < 0.97
    _, low, high = intervals(10, 10, 10, 40)["recall"]  # by Jeffreys: 0.783-1.0
    assert 0.75 < low < 0.82
    assert high == 1.0
    _, low, high = intervals(0, 10, 0, 40)["recall"]
    assert low == 0.0
    assert 0.18 < high < 0.25


def test_a_run_is_reproduced(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train.main(words)
    capsys.readouterr()
    train.main(["--reproduce", str(tmp_path / "run")])
    assert "reproduced: 12 train events, bit for bit" in capsys.readouterr().out
    assert str(tmp_path / "run`") not in (tmp_path / "run_again/model/README.md").read_text()
    report.main(["--diff", str(tmp_path / "run"), str(tmp_path / "run_again")])
    assert capsys.readouterr().out == "they do not differ\n"
    with monkeypatch.context() as patch:
        patch.setattr("accel_ft.reporting.compare.table", lambda _: "\x1b[2Ja name of theirs")
        report.main(["--diff", str(tmp_path / "run"), str(tmp_path / "run_again")])
    assert capsys.readouterr().out == "\\x1b[2Ja name of theirs\n"  # escaped
    two = [str(tmp_path / "run"), str(tmp_path / "run_again")]
    with pytest.raises(SystemExit, match="2"):
        report.main(["--diff", *two, "--output", str(tmp_path / "report")])
    assert "--diff prints, and writes nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        report.main(["--diff", two[0]])
    assert "--diff needs two runs" in capsys.readouterr().err
    log = tmp_path / "run_again/metrics.jsonl"
    logged = log.read_text()
    for kept, words_of_it in (
        (3, "reached its end: True | False\n"),
        (0, "train events, none for the same updates, so no losses are compared: 12 |"),
    ):
        log.write_text("".join(logged.splitlines(keepends=True)[:kept]))
        report.main(["--diff", str(tmp_path / "run"), str(tmp_path / "run_again")])
        assert words_of_it in capsys.readouterr().out
    log.write_text(logged)
    receipt = tmp_path / "run/receipt.json"
    was = receipt.read_text().replace('"mixed_precision": "no"', '"mixed_precision": "bf16"')
    receipt.write_text(was.replace('"threads": 1', '"threads": 96'))
    third = ["--reproduce", str(tmp_path / "run"), "--output_dir", str(tmp_path / "third")]
    with pytest.raises(UserError, match="was bf16, now it is no. Fix: `accelerate launch --mixed"):
        train.main(third)
    assert not (tmp_path / "third").exists()
    with pytest.raises(UserError, match="not reproduced") as caught:
        train.main([*third, "--learning_rate", "2e-3", "--allow_changed", "mixed_precision"])
    assert "receipt strategy.mixed_precision: bf16 | no\n" in str(caught.value)
    assert "receipt machine.threads: 96 | 1\n" in str(caught.value)
    assert "setting learning_rate: 0.001 | 0.002" in str(caught.value)
    assert "update 2: loss" in str(caught.value) or "update 2: learning_rate" in str(caught.value)
    third = tmp_path / "third"
    train.main(["--config", str(third / "config.yaml"), "--output_dir", str(tmp_path / "fourth")])
    (third / "report.html").write_text("ended at update 12")
    more = ["--config", str(third / "config.yaml"), *LATEST, "--num_train_epochs", "3"]
    train.main([*more, "--report_to", "none"])
    assert not (third / "report.html").exists()
    with pytest.raises(UserError, match=r"num_steps, over all starts: \[12, 18\] \| \[18\]"):
        train.main(["--reproduce", str(third)])


def test_differences_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from accel_ft.reporting.compare import table

    folder = "a_rather_long_folder_of_a_cluster/" * 3
    assert table([("setting", folder + "a", folder + "b")]).endswith("a | " + folder + "b")


def test_the_doctor_examines_what_is_to_be_reproduced(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_file: Path
) -> None:
    from accel_ft import doctor
    from accel_ft.diagnosis import job

    train.main([*words, "--max_steps", "1"])
    seen = []
    monkeypatch.setattr(job, "examine", lambda config: seen.append(config) or iter(()))
    doctor.main(["--reproduce", str(tmp_path / "run")])
    assert seen[0].train_file == rows_file
    assert seen[0].learning_rate == 1e-3


def test_what_is_no_number_does_not_differ_from_itself() -> None:
    from accel_ft.reporting.compare import curves
    from accel_ft.reporting.record import Record

    def record(loss: float) -> Record:
        events = [{"event": "eval", "step": 1, "eval_loss": loss}]
        return Record("run", {}, {}, events, {}, [])

    assert list(curves(record(float("nan")), record(float("nan")))) == []
    assert len(list(curves(record(float("nan")), record(1.0)))) == 1
    assert len(list(curves(record(None), record(1.0)))) == 1  # how the log stores NaN
    assert len(list(curves(record(1.0), record(None)))) == 1


def test_a_last_value_that_one_run_lacks() -> None:
    from accel_ft.reporting.compare import differences
    from accel_ft.reporting.record import Record

    def record(value: float | None) -> Record:
        events = [{"event": "end", "step": 1, "eval_loss": 0.5, "eval_roc_auc": value}]
        return Record("run", {}, {"starts": []}, events, {}, [])

    for one, other in ((None, 0.7), (0.7, None)):
        told = ("final roc_auc on the validation rows", one, other)
        assert list(differences(record(one), record(other)))[-1] == told


def test_a_reproduction_says_where_it_differs_and_why(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    """The original run was stopped, logged every 4 updates only, and its pretrained weights have changed since."""
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

    train.main([*words, "--max_steps", "3"])
    monkeypatch.setattr(receipt, "_version", lambda package: f"9.9 of {package}")
    other = write_rows(tmp_path / "other.csv", 40, seed=9)
    more = ["--max_steps", "3", "--train_file", str(other), "--output_dir", str(tmp_path / "b")]
    train.main([*words, *more])
    one, two = (read_record(tmp_path / name) for name in ("run", "b"))
    told = {what for what, _, _ in differences(one, two)}
    assert {"receipt data.train", "receipt versions.torch", "receipt num_samples.train"} <= told
    assert {"final loss on the validation rows", "final loss on the test rows"} <= told
    assert {"git_commit", "python", "versions", "machine", "tokenizer", "pretrained"} <= set(
        one.receipt
    )
    two.receipt["warnings"].append("of the second start")
    two.settings.update(push_to_hub=True, hub_model_id="me/x", hub_private_repo=True)
    assert told == {what for what, _, _ in differences(one, two)}
    assert one.receipt["machine"]["device"]
    assert one.receipt["machine"]["threads"] == 1
    assert one.receipt["machine"]["malloc"]
    assert len(one.receipt["pretrained"]["model.safetensors"]) == 64


def test_differences_at_an_earlier_start(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Receipt and config.yaml describe the last start, the curve all: earlier starts are compared, too; a resume tells of
    other versions.
    """  # fmt: skip
    from accel_ft.runtime import receipt

    words += ["--learning_rate", "2e-3"]
    with monkeypatch.context() as patch:
        patch.setattr(receipt, "_version", lambda package: f"9.9 of {package}")
        with pytest.raises(RuntimeError):
            stopped_at(3, [*words, "--learning_rate", "1e-3"])
    train.main([*words, *LATEST, "--allow_changed", "learning_rate"])
    other = "other versions than at the last start, so the last bits may differ: torch 9.9 of torch, now "
    assert other in capsys.readouterr().err
    with pytest.raises(UserError) as caught:
        train.main(["--reproduce", str(tmp_path / "run")])
    told = str(caught.value)
    assert other not in capsys.readouterr().err
    assert "identity.learning_rate, over all starts: [0.001, 0.002] | [0.002]" in told
    assert "versions.torch, over all starts: ['9.9 of torch', " in told
    assert "time" not in told


def test_card_and_report_of_a_run_killed_before_them(words: list[str], tmp_path: Path) -> None:
    """A resume of the finished run writes the missing files, and trains nothing."""
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


def test_a_report_whose_libraries_are_missing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The run ends well, and says how the report is written later: a resume of it would not."""
    from accel_ft import errors

    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    train.main([*words, "--max_steps", "1", "--report_to", "html"])
    told = f"pip install 'accel_ft[report]'. To try again: python -m accel_ft.report {tmp_path / 'run'}\n"
    assert told in capsys.readouterr().err


def test_files_of_a_run_are_read_as_they_are(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts may hold any Unicode line break; truncated predictions or mistakes are left out, with a message."""
    from accel_ft.reporting.record import read_record

    train.main([*words, "--max_steps", "1"])
    file = tmp_path / "run/mistakes.jsonl"
    first = json.loads(file.read_text().split("\n")[0]) | {"text": "one\u2028two\x85three"}
    file.write_text(json.dumps(first, ensure_ascii=False) + "\n")
    assert read_record(tmp_path / "run").mistakes == [first]
    with (tmp_path / "run/metrics.jsonl").open("a") as log:
        log.write('null\n[1]\n{"event": "ev')
    assert read_record(tmp_path / "run").of("end")
    for name in ("mistakes.jsonl", "predictions.npz"):  # an interrupted copy
        whole = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes(whole[: len(whole) // 2])
        report.main([str(tmp_path / "run")])
        assert f"{tmp_path}/run: its predictions or mistakes cannot" in capsys.readouterr().err
        (tmp_path / "run" / name).write_bytes(whole)
    (tmp_path / "run/config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "run")


def test_the_pictures_of_somebody_elses_run_stay_in_it(words: list[str], tmp_path: Path) -> None:
    """Metric names become file names, and existing pictures may be symlinks: nothing is written outside the run."""
    train.main([*words, "--max_steps", "2", "--eval_steps", "1"])
    run, mine = tmp_path / "run", tmp_path / "mine.png"
    mine.write_text("precious")
    (run / "report/eval_").mkdir(parents=True)
    (run / "report/train_loss.png").symlink_to(mine)
    with (run / "metrics.jsonl").open("a") as log:
        for step in (1, 2):
            print(json.dumps({"event": "eval", "step": step, "eval_/../../../mine": 0.5}), file=log)
    report.main([str(run)])
    assert mine.read_text() == "precious"
    pictures = {path.name for path in (run / "report").iterdir() if path.is_file()}
    assert pictures >= {"train_loss.png", "eval__.._.._.._mine.png"}
    assert not (run / "report/train_loss.png").is_symlink()
    (run / "report").rename(tmp_path / "elsewhere")
    (run / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="run/report: is a link to .*elsewhere. Fix: remove it"):
        report.main([str(run)])


def test_a_metric_that_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN is printed and raises no error: the push and the comparison of `--reproduce` come after it."""
    config = TrainConfig(problem_type="regression", push_to_hub=False)
    events = [{"event": "test", "test_rmse": None}, {"event": "end", "eval_rmse": 0.5}]
    train._say_and_push(config, events)
    told = capsys.readouterr().out
    assert "rmse on the validation rows: 0.5000" in told
    assert "rmse on the test rows: NaN" in told

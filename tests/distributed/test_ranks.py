"""Several real ranks on gloo: order, resume and evaluation; the same curve as one process."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import job_words, launch, run_hash, write_rows
from forked import on_ranks
from safetensors.torch import load_file, save_file

from accel_ft import evaluate, predict, train
from accel_ft.errors import DataError


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    still_model: Path,
    rows_file: Path,
    odd_file: Path,
) -> dict[int, list[Any]]:
    """By number of ranks (1, 2, 4): sample ids, curves without and with weights, micro-batch sizes under `auto`; 47 rows,
    8 an update, at most 4 a micro-batch.
    """  # fmt: skip
    folder = tmp_path_factory.mktemp("seen")
    results = {}
    for ranks in (1, 2, 4):
        ids = job_words(tiny_model, rows_file, odd_file, folder / f"ids_{ranks}")
        curve = job_words(still_model, rows_file, odd_file, folder / f"curve_{ranks}")
        weighted = job_words(still_model, rows_file, odd_file, folder / f"weighted_{ranks}")
        even = job_words(still_model, rows_file, odd_file, folder / f"even_{ranks}")
        auto = job_words(tiny_model, rows_file, odd_file, folder / f"auto_{ranks}")
        for words in (curve, weighted, even):
            words += ["--save_steps", "12"]
        results[ranks] = on_ranks(
            ranks, {"do": "sample_ids", "words": ids}, {"do": "curve", "words": curve},
            {"do": "curve", "words": [*weighted, "--class_weights", "1,5,0.1,2", "--label_smoothing_factor", "0.1"]},
            {"do": "curve", "words": [*even, "--oversampling", "balanced"]},
            {"do": "fitted", "words": auto},
            config="cpu.yaml" if ranks == 1 else "cpu_ddp.yaml",
        )  # fmt: skip
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_sample_once_an_epoch(seen: dict[int, list[Any]], ranks: int) -> None:
    epochs = seen[ranks][0]
    for epoch in epochs:
        assert len(epoch) == ranks
        assert sorted(place for rank in epoch for place in rank) == list(range(47))
    assert epochs[0] != epochs[1]


def test_one_curve(seen: dict[int, list[Any]]) -> None:
    """One process with 2 accumulation steps, 2 ranks and 4 ranks: the same losses and gradient norms, also for the last,
    shorter batch of 7 rows. The tolerance is float32's: sums are taken in another order.
    """
    one = seen[1][1]
    assert len(one) == 12
    for ranks in (2, 4):
        for ours, theirs in zip(seen[ranks][1], one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_one_curve_with_class_weights_and_smoothing(seen: dict[int, list[Any]]) -> None:
    """The ranks' weights differ; the loss is normalised by those of the whole global batch."""
    one = seen[1][2]
    assert one != seen[1][1]
    for ranks in (2, 4):
        for ours, theirs in zip(seen[ranks][2], one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_one_curve_with_oversampling(seen: dict[int, list[Any]]) -> None:
    one = seen[1][3]
    assert one != seen[1][1]
    for ranks in (2, 4):
        for ours, theirs in zip(seen[ranks][3], one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_auto_is_what_fits_on_the_rank_with_least_room(seen: dict[int, list[Any]]) -> None:
    assert {ranks: seen[ranks][4] for ranks in seen} == {1: [2], 2: [2] * 2, 4: [2] * 4}


@pytest.mark.parametrize(("num_ranks", "steps"), [(2, range(1, 13)), (3, (3, 7))])
def test_resume_is_bit_identical(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path, num_ranks: int, steps: Any
) -> None:
    """With dropout, shuffling and 2 accumulation steps; on 2 ranks, after each of the 12 updates. From 3 ranks on, the
    order of a sum matters.
    """
    words = job_words(tiny_model, rows_file, odd_file, tmp_path)
    words += ["--per_device_train_batch_size", "2"]
    del words[words.index("--output_dir") : words.index("--output_dir") + 2]
    task = {"do": "resume_everywhere", "words": words, "folder": tmp_path, "steps": list(steps)}
    on_ranks(num_ranks, task)
    receipt = json.loads((tmp_path / "whole" / "receipt.json").read_text())
    assert (receipt["strategy"]["num_processes"], receipt["accumulation_steps"]) == (num_ranks, 2)
    whole = run_hash(tmp_path / "whole")
    for step in steps:
        assert run_hash(tmp_path / f"resumed_{step}") == whole, step


def test_command_line_on_two_ranks_evaluates_as_one(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user runs it: trained on 2 ranks in bf16, then evaluated on 1 and on 2. All 21 rows count once."""
    output_dir = tmp_path / "run"
    done = launch(
        "cpu_ddp.yaml",
        "-m",
        "accel_ft.train",
        *job_words(tiny_model, rows_file, odd_file, output_dir),
    )
    assert done.stdout.count("model:") == 1  # only rank 0 prints
    receipt = json.loads((output_dir / "receipt.json").read_text())
    assert receipt["strategy"] == {
        "distributed_type": "MULTI_CPU", "num_processes": 2, "device": "cpu", "mixed_precision": "bf16", "compile": "NO",
    }  # fmt: skip
    assert receipt["strategy_settings"]["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    words = [
        "-m",
        "accel_ft.evaluate",
        "--checkpoint",
        output_dir,
        "--per_device_eval_batch_size",
        4,
        "--output",
    ]
    evaluate.main([str(word) for word in [*words[2:], tmp_path / "one.json"]])
    launch("cpu_ddp.yaml", "--mixed_precision", "no", *words, tmp_path / "two.json")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one["num_samples"] == 21
    assert one == two
    # Another machine's file differs, but its rows are as long: every rank has as many batches.
    other = {"test": "another fingerprint"}
    monkeypatch.setattr("accelerate.utils.gather_object", lambda read: [*read, read[0] | other])
    with pytest.raises(DataError, match="rank 1 reads other test rows than rank 0"):
        evaluate.main([str(word) for word in words[2:-1]])


def test_resume_on_another_number_of_ranks_says_so(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    on_ranks(2, {"do": "curve", "words": [*words, "--max_steps", "4"]})
    train.main([*words, "--max_steps", "8", "--resume_from_checkpoint", "latest"])
    error = capsys.readouterr().err
    assert "saved by 2 processes (cpu), resumed by 1 (cpu)" in error
    assert "dropout's random state cannot be" in error


def test_predict_on_two_ranks_is_predict_on_one(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same lines in the same order, from a file and from a pipe that only rank 0 reads."""
    train.main([*job_words(tiny_model, rows_file, odd_file, tmp_path / "run"), "--max_steps", "2"])
    words = ["--checkpoint", tmp_path / "run" / "model", "--all_scores"]
    many = write_rows(tmp_path / "many.csv", 301)
    for source, rows in (("file", write_rows(tmp_path / "one.csv", 1)), ("pipe", many)):
        texts = "".join(row["text"] + "\n" for row in csv.DictReader(rows.read_text().splitlines()))
        told = ["--input", "-" if source == "pipe" else rows]
        more = {"input": texts} if source == "pipe" else {}
        words_2 = ["-m", "accel_ft.predict", *words, *told, "--output", tmp_path / "2.jsonl"]
        launch("cpu_ddp.yaml", "--mixed_precision", "no", *words_2, **more)
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(texts.encode())))
        )
        predict.main([str(word) for word in [*words, *told, "--output", tmp_path / "1.jsonl"]])
        one, two = (
            [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            for name in ("1.jsonl", "2.jsonl")
        )
        assert len(one) == len(texts.splitlines())
        for a, b in zip(one, two, strict=True):
            assert a["scores"] == pytest.approx(b.pop("scores"), abs=2e-6)
            assert a["score"] == pytest.approx(b.pop("score"), abs=2e-6)
            assert {key: a[key] for key in b} == b


def test_fit_in_a_script_leaves_no_group_open(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """A gloo thread may abort the process at exit."""
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    settings = {
        key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    settings = settings | {"num_train_epochs": 1, "save_total_limit": None}
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os\nfrom torch import distributed as dist\nfrom accel_ft import fit\n"
        "atexit.register(lambda: os.write(1, b'open\\n' if dist.is_initialized() else b'closed\\n'))\n"
        f"fit(**{settings!r})\nassert dist.is_initialized()\n"
    )
    done = launch("cpu_ddp.yaml", "--num_processes", 2, script)
    assert done.stdout.split().count("closed") == 2
    assert "open" not in done.stdout.split()


def test_a_machine_with_another_model(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """DDP would send rank 0's weights to layers with another dropout; FSDP2 would mix the weights."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    about = json.loads((other / "config.json").read_text())
    weights = load_file(other / "model.safetensors")
    for change in ("dropout", "weights"):
        now = about | {"hidden_dropout_prob": 0.3} if change == "dropout" else about
        (other / "config.json").write_text(json.dumps(now))
        if change == "weights":
            weights["pooler.dense.bias"][0] += 1
            save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        job = {
            "model_name_or_path": str(tiny_model), "train_file": str(rows_file),
            "validation_file": str(odd_file), "output_dir": str(tmp_path / change), "max_steps": 1,
            "max_seq_length": 32,
        }  # fmt: skip
        (told,) = on_ranks(2, {"do": "told_of_another_model", "job": job, "other": other})
        what = {"dropout": "config.json's hidden_dropout_prob", "weights": "bert.pooler.dense.bias"}
        rank_1 = (
            f"rank 1 has loaded another model than rank 0: {what[change]} differ. Fix: the same"
        )
        assert [words.startswith(rank_1) for words in told] == [True, True], told

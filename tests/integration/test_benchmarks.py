"""The README's benchmarks run; the figures measured here mean nothing."""

import json
import re
from pathlib import Path

import pytest
from conftest import make_tiny_model, run

from accel_ft import train

FOLDER = "examples/benchmarks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_positions=128)


def test_against_the_trainer(model: Path, tmp_path: Path) -> None:
    words = ["--turns", 1, "--max_train_samples", 64, "--only", "ours", "tuned", "bare"]
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    settings = {"model_type": "distilbert"} | sizes
    words += ["--model", model, "--random", json.dumps(settings), "--output", tmp_path]
    printed = run("python", f"{FOLDER}/speed.py", *words).stdout
    written = json.loads((tmp_path / "speed.json").read_text())
    assert written["job"]["job"]["model_name_or_path"] != str(model)  # a copy with random weights
    assert [row.split(" |")[0] for row in printed.splitlines()[2:5]] == [
        "| ours",
        "| tuned",
        "| bare",
    ]
    for known in (written["date"], (written["git_commit"] or "")[:7], written["machine"]["device"]):
        assert known in printed.splitlines()[-1]
    rows = written["table"]
    assert rows["bare"]["padding"] == pytest.approx(
        rows["ours"]["padding"], abs=1e-3
    )  # bare trains on the batches of ours
    assert 0 < rows["ours"]["padding"] < rows["tuned"]["padding"]
    assert all(row["samples_per_second"] > 0 and 0 < row["of_peak"] < 1 for row in rows.values())
    assert rows["tuned"]["ratio"] == pytest.approx(
        rows["ours"]["samples_per_second"] / rows["tuned"]["samples_per_second"]
    )
    assert (tmp_path / "speed.png").is_file()


def test_against_the_pipeline(words: list[str], tmp_path: Path, odd_file: Path) -> None:
    train.main([*words, "--num_train_epochs", "8"])
    words = ["--turns", 1, "--checkpoint", tmp_path / "run/model", "--input", odd_file]
    printed = run("python", f"{FOLDER}/predict.py", *words).stdout
    assert "the same label for 21 of 21 rows" in printed


def test_growth_of_the_plan() -> None:
    printed = run("python", f"{FOLDER}/growth.py", "--samples", 10**6).stdout
    assert re.search(r"\| 1,000,000 \| \d+\.\d{3} s \| \d+\.\d{3} s \| \d+\.\d{3} ms \| ", printed)

"""`accel_ft.predict` against `transformers.pipeline(batch_size=32)` on the same rows.

python examples/benchmarks/predict.py --checkpoint runs/quickstart/model [--input ROWS.csv]
    [--turns 5]

Each runs in a separate process, in turn (A B A B ...), in float32. The time is from the loaded
model to the last label: reading, tokenising and labelling, without the start of Python.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples/data/news_sample/validation.csv"


def ours(checkpoint: str, rows: str) -> tuple[float, list[str]]:
    """Label the rows with the parts of `accel_ft.predict`; return the seconds and the labels."""
    from accel_ft.config import PredictConfig
    from accel_ft.predict import Predictor, open_rows
    from accel_ft.runtime.launch import make_accelerator

    config = PredictConfig(checkpoint=checkpoint, input=rows)
    predictor = Predictor(config, make_accelerator())
    start = time.perf_counter()
    labels = [line["label"] for lines in predictor.label(open_rows(config)) for line in lines]
    return time.perf_counter() - start, labels


def theirs(checkpoint: str, rows: str) -> tuple[float, list[str]]:
    """Label the rows with a pipeline that reads the texts one by one; return the same."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    device = 0 if torch.cuda.is_available() else -1
    classify = pipeline("text-classification", model, tokenizer=tokenizer, device=device)
    start = time.perf_counter()
    with open(rows, newline="", encoding="utf-8") as file:
        texts = (row["text"] for row in csv.DictReader(file))
        longest = getattr(model.config, "max_seq_length", None)  # the length a run trained with
        found = classify(texts, batch_size=32, truncation=True, max_length=longest)
        labels = [each["label"] for each in found]
    return time.perf_counter() - start, labels


def main() -> None:
    """Time both in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--input", default=str(SAMPLE))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant = {"ours": ours, "pipeline": theirs}[options.contestant]
        print(json.dumps(contestant(options.checkpoint, options.input)))
        return
    seconds: dict[str, list[float]] = {"ours": [], "pipeline": []}
    labels = {}
    for _ in range(options.turns):
        for name, times in seconds.items():
            command = [sys.executable, *sys.argv, "--contestant", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            took, labels[name] = json.loads(done.stdout.splitlines()[-1])
            times.append(took)
    count = len(labels["ours"])
    same = sum(a == b for a, b in zip(labels["ours"], labels["pipeline"], strict=True))
    ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
    for name, times in seconds.items():
        print(f"{name:10} {count / statistics.median(times):8.1f} rows/s")
    print(
        f"ours is faster by {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}); "
        f"the same label for {same} of {count} rows"
    )


if __name__ == "__main__":
    main()

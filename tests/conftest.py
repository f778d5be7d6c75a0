"""A tiny random model, small labelled files, and subprocesses with a time limit. No network, no GPU."""

import atexit
import csv
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Before any library reads them: a cache of the tests' own, and no access to the Hub.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="accel_ft-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # for test_gpu.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests without a GPU run alike on every machine
os.environ["OMP_NUM_THREADS"] = "1"  # with so tiny a model, more threads only wait for each other
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does `nohup`

import pytest
import torch

ROOT = Path(__file__).parent.parent
WORDS = {
    "World": "treaty minister border election embassy parliament troops refugees".split(),
    "Sports": "goal striker league coach medal innings playoff stadium".split(),
    "Business": "shares profit bank merger tariff prices investors earnings".split(),
    "Sci/Tech": "software orbit genome chip browser telescope protein laptop".split(),
}
FILLING = "the a of in to on with from after says new two more for and".split()


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog see the package's messages, even after a run set its own handler or a doctor its level."""
    monkeypatch.setattr(logging.getLogger("accel_ft"), "propagate", True)
    logging.getLogger("accel_ft").setLevel(logging.INFO)


def write_rows(path: Path, num_rows: int, seed: int = 0) -> Path:
    """Write a CSV of `num_rows` texts of 3 to 30 words, each with a few words of its class."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(num_rows):
            label = list(WORDS)[number % 4]
            words = rng.choices(FILLING, k=rng.randint(1, 26)) + rng.choices(
                WORDS[label], k=rng.randint(2, 4)
            )
            rng.shuffle(words)
            writer.writerow([" ".join(words), label])
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers and about 17,000 parameters with dropout, and a word-level tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def make_tiny_model(folder: Path, max_positions: int = 64, hidden_size: int = 32) -> Path:
    """Write the tiny model and its tokenizer; return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *FILLING,
        *(word for group in WORDS.values() for word in group),
    ]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=max_positions,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def still_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model without dropout."""
    folder = tmp_path_factory.mktemp("still_model")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """47 rows: a size that 2, 3, 4 and 8 do not divide."""
    return write_rows(tmp_path_factory.mktemp("rows") / "train.csv", 47)


@pytest.fixture(scope="session")
def odd_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 rows for evaluation."""
    return write_rows(tmp_path_factory.mktemp("rows") / "validation.csv", 21, seed=1)


def run(
    *words: object, seconds: float = 240, check: bool = True, **kwargs
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root, within a time limit; if it fails, show its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | kwargs.pop(
        "env", {}
    )
    command = [sys.executable if word == "python" else str(word) for word in words]
    done = subprocess.run(
        command,
        cwd=kwargs.pop("cwd", ROOT),
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0 or not check, story(
        command, done.returncode, done.stdout, done.stderr
    )
    return done


def story(command: list[str], code: int | None, stdout: str, stderr: str) -> str:
    """Return an ended command's output and the ends of its ranks' logs."""
    logs = [Path(log) for log in set(re.findall("Its log: (.+)", stderr))]
    crash = "\n".join(log.read_text()[-4000:] for log in logs if log.is_file())
    return f"{command} ended with {code}\n{stdout[-4000:]}\n{stderr[-8000:]}\n{crash}"


def launch(config_file: str | None, *words: object, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch`, with a config file from accelerate_configs/, another one, or none."""
    config = []
    if config_file is not None:
        path = config_file if "/" in config_file else f"accelerate_configs/{config_file}"
        config = ["--config_file", path]
    return run("python", "-m", "accelerate.commands.launch", *config, *words, **kwargs)


def job_words(model: Path, train_file: Path, eval_file: Path, output_dir: Path) -> list[str]:
    """Arguments of a small job with dropout and shuffling: 12 updates; on one process, of 2 micro-batches of 4 rows."""
    values = {
        "model_name_or_path": model,
        "train_file": train_file,
        "validation_file": eval_file,
        "test_file": eval_file,
        "output_dir": output_dir,
        "num_train_epochs": 2,
        "global_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_seq_length": 32,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": "none",
        "report_to": "none",
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def events_of(output_dir: Path) -> list[dict]:
    """The events of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def untimed_verdicts(findings: Iterable[dict[str, Any]]) -> set[str]:
    """Verdicts of the doctor except the loader's: on a busy machine, batches of 3 ms may be late."""
    return {finding["verdict"] for finding in findings if finding["check"] != "loader"}


def run_hash(output_dir: Path) -> dict[str, object]:
    """What must be bit-identical: final weights, optimizer state, and every logged value except speeds, times, padding and memory."""
    timed = (
        "samples_per_second",
        "tokens_per_second",
        "padding",
        "eval_seconds",
        "test_seconds",
        "peak_memory",
        "time",
    )
    newest = max((output_dir / "checkpoints").glob("step_*"))
    optimizer = torch.load(newest / "optimizer.bin", weights_only=True)
    moments = [
        value.numpy().tobytes() for state in optimizer["state"].values() for value in state.values()
    ]
    return {
        "model": hashlib.sha256(
            (output_dir / "model" / "model.safetensors").read_bytes()
        ).hexdigest(),
        "optimizer": hashlib.sha256(b"".join(moments)).hexdigest(),
        "events": [
            {key: value for key, value in event.items() if key not in timed}
            for event in events_of(output_dir)
            if event["event"] not in ("resume", "save", "preempted")
        ],
    }


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path) -> list[str]:
    """A job of 12 updates into tmp_path / "run"."""
    return job_words(tiny_model, rows_file, odd_file, tmp_path / "run")


def cut_off(folder: Path, step: int) -> None:
    """Reduce a finished run to what a kill after update `step` would leave."""
    from accel_ft.checkpoint import transaction

    for number, path in transaction.list_published(folder / "checkpoints"):
        if number > step:
            transaction.remove(path)
    transaction.remove(folder / "model")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))


LATEST = ["--resume_from_checkpoint", "latest"]


def stopped_at(step: int, words: list[str]) -> None:
    """Train until an exception after update `step`."""
    from accel_ft import train
    from accel_ft.engine.run import Run

    after = Run.after_update

    def fail(run: Run) -> None:
        if run.step == step:
            raise RuntimeError("stopped")
        after(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after_update", fail)
        train.main(words)

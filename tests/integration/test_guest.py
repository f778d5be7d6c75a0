"""`fit` and `load_classifier` inside another program: its global state stays as it was."""

import gc
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import ROOT, job_words, launch
from transformers.models.bert.modeling_bert import BertLayer

import accel_ft
from accel_ft import train
from accel_ft.errors import ConfigError, Preempted, UserError
from accel_ft.predict import Alone


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path) -> dict[str, Any]:
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    keys = {key.removeprefix("--"): each for key, each in zip(words[::2], words[1::2], strict=True)}
    return keys | {"save_total_limit": None, "report_to": "none", "max_steps": 3}


def program(tmp_path: Path, text: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=240,
        check=False, cwd=tmp_path, **streams,
    )  # fmt: skip


def test_inference_does_not_use_accelerates_state(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's state is global: another thread may be training, in another precision."""
    model = accel_ft.fit(**job)
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()
    classifier = accel_ft.load_classifier(model, all_scores=True)
    assert classifier.accelerator.precision == "no"
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as a launcher sets it
        assert accel_ft.load_classifier(model).accelerator.precision == "bf16"
    found = classifier.predict(["a goal", "profit"])
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
    assert GradientState._shared_state == {}
    from accelerate import Accelerator

    try:
        Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
        assert classifier.predict(["a goal", "profit"]) == found
        assert (
            accel_ft.load_classifier(model, all_scores=True).predict(["a goal", "profit"]) == found
        )
        assert GradientState().num_steps == 4
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_opening_draws_no_random_numbers(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it restore their state: other threads that drew meanwhile would draw the same numbers again."""
    model = accel_ft.fit(**job)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    monkeypatch.setattr(torch, "set_rng_state", lambda _: pytest.fail("wound back"))
    accel_ft.load_classifier(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    monkeypatch.undo()
    lora = accel_ft.fit(**job | {"lora_r": 2, "output_dir": f"{job['output_dir']}2"}).parent
    accel_ft.load_classifier(lora / "checkpoints/step_00000003")  # draws, then restores
    assert torch.equal(torch.get_rng_state(), before[0])


def test_nothing_of_a_run_stays_in_memory(job: dict[str, Any]) -> None:
    def count() -> int:
        return sum(type(each) is BertLayer for each in gc.get_objects())

    gc.collect()
    gc.disable()  # may run late: `fit` must free its own cycles
    try:
        before = count()
        accel_ft.fit(**job)
        assert count() == before
    finally:
        gc.enable()


def test_messages_go_where_they_went(job: dict[str, Any]) -> None:
    ours, mine = logging.getLogger("accel_ft"), logging.NullHandler()
    before = ours.handlers, ours.level, ours.propagate
    try:
        ours.handlers, ours.propagate = [mine], True
        ours.setLevel(logging.ERROR)
        accel_ft.fit(**job)
        assert (ours.handlers, ours.level, ours.propagate) == ([mine], logging.ERROR, True)
    finally:
        ours.handlers, ours.propagate = before[0], before[2]
        ours.setLevel(before[1])


def test_switches_stay_the_programs(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's switches for CUDA, and the GPUs that child processes see."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    backends = torch.backends
    for visible in ("0", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        backends.cudnn.allow_tf32 = True  # a command run earlier in this process turns it off
        backends.cuda.enable_cudnn_sdp(True)
        accel_ft.fit(**job | {"output_dir": f"{job['output_dir']}_{visible}"})
        assert backends.cudnn.allow_tf32
        assert backends.cuda.cudnn_sdp_enabled()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


OWN_LOOP = """
import csv, torch, accel_ft
from accelerate import Accelerator
from accel_ft.engine import loop

own, module = Accelerator(cpu=True), torch.nn.Linear(2, 2)
model, optimizer = own.prepare(module, torch.optim.SGD(module.parameters(), 1.0))
job, limit = JOB | {"per_device_train_batch_size": 4, "global_batch_size": 8}, csv.field_size_limit()
accel_ft.fit(**job)
assert own.gradient_accumulation_steps == 1
assert csv.field_size_limit() == limit

forward_backward, calls = loop.forward_backward, []
def is_full(run, *args):
    calls.append(0)
    if len(calls) == 3:
        raise torch.OutOfMemoryError
    return forward_backward(run, *args)
loop.forward_backward = is_full
try:
    accel_ft.fit(**job | {"output_dir": "full"})
except torch.OutOfMemoryError as error:
    step, held = error.__traceback__.tb_next.tb_next, []  # beyond `fit` itself
    while step is not None:
        held += step.tb_frame.f_locals
        step = step.tb_next
    assert not held, held
else:
    raise AssertionError
before = model.weight.clone()
own.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
assert not torch.equal(model.weight, before)
"""


def test_an_accelerator_of_the_programs_goes_on_as_it_was(
    job: dict[str, Any], tmp_path: Path
) -> None:
    """After a run that accumulated over two micro-batches, and after one that failed between them, too."""
    done = program(tmp_path, OWN_LOOP.replace("JOB", repr(job)))
    assert done.returncode == 0, done.stderr


def test_a_default_device_that_is_no_cpu_is_refused(job: dict[str, Any]) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="torch's default device is meta"):
        accel_ft.fit(**job)


def test_no_checkpoint_is_none() -> None:
    with pytest.raises(ConfigError, match="checkpoint=None: must be a folder or a name"):
        accel_ft.load_classifier(None)  # type: ignore[arg-type]


def test_a_loop_over_jobs_does_not_go_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not issubclass(Preempted, UserError)

    def stop(_: object) -> None:
        raise Preempted("saved")

    monkeypatch.setattr(train, "fit", stop)
    with pytest.raises(Preempted) as caught:
        train.main(["--output_dir", "runs/none"])
    assert not hasattr(caught.value, "__notes__")  # that recommend the doctor


def test_half_precision_on_the_cpu() -> None:
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Alone(torch.device("cpu"), name).autocast():
            assert torch.get_autocast_dtype("cpu") == kind


def test_signals_that_the_program_handles_itself(job: dict[str, Any], tmp_path: Path) -> None:
    """Its SIGHUP handler is called during a run, and its wakeup fd, by which asyncio notices signals, is written to."""
    done = program(
        tmp_path,
        "import os, signal, socket\nimport accel_ft\nfrom accel_ft.engine import run\n"
        "signal.signal(signal.SIGHUP, lambda *_: print('read anew', flush=True))\n"
        "here, there = socket.socketpair(); there.setblocking(False)\n"
        "signal.set_wakeup_fd(there.fileno())\n"
        "after = run.Run.after_update\n"
        "run.Run.after_update = lambda self: (os.kill(os.getpid(), signal.SIGHUP), after(self))[1]\n"
        f"accel_ft.fit(**{job!r})\n"
        "here.settimeout(20); heard = b''\n"
        "while len(heard) < 3: heard += here.recv(9)\n"
        "print(set(heard) == {signal.SIGHUP}, signal.set_wakeup_fd(-1) == there.fileno())\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("read anew") == 3
    assert done.stdout.endswith("True True\n")


def test_a_host_that_does_not_listen(job: dict[str, Any], tmp_path: Path) -> None:
    """The program's signals have filled its wakeup fd, which it reads only after the run: nothing fails or blocks."""
    done = program(
        tmp_path,
        "import signal, socket\nimport accel_ft\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "here, there = socket.socketpair(); there.setblocking(False)\n"
        "signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)\n"
        "try:\n    while True: there.send(b'x')\nexcept BlockingIOError: pass\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.002)\n"
        f"accel_ft.fit(**{job!r})\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\nprint('done')\n",
    )
    assert (done.returncode, done.stdout.endswith("done\n")) == (0, True), done.stderr
    assert "Exception in thread" not in done.stderr


def test_a_crash_is_told_where_the_program_wants_it(job: dict[str, Any], tmp_path: Path) -> None:
    done = program(
        tmp_path,
        "import faulthandler\nimport accel_ft\nfile = open('crash.log', 'w')\n"
        f"faulthandler.enable(file)\naccel_ft.fit(**{job!r})\n"
        "faulthandler._sigsegv()\n",
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "crash.log").read_text()


def test_a_crash_of_the_command_is_told_in_the_runs_log(
    job: dict[str, Any], tmp_path: Path
) -> None:
    words = [str(word) for pair in job.items() if pair[1] is not None for word in pair]
    words[::2] = [f"--{word}" for word in words[::2]]
    file = tmp_path / "program.py"
    file.write_text(
        "import faulthandler, runpy, sys\nfrom accel_ft.engine import run\n"
        "run.Run.after_update = lambda self: faulthandler._sigsegv()\n"
        f"sys.argv[1:] = {words!r}\nrunpy.run_module('accel_ft.train', run_name='__main__')\n"
    )
    command = [sys.executable, "-X", "faulthandler", "-X", "accel_ft_started_anew", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "run/ranks/rank_00000.log").read_text()


def test_a_fault_of_one_rank_is_raised_on_all(job: dict[str, Any], tmp_path: Path) -> None:
    """If only one rank raised it and the program went on, the other ranks would wait for that rank."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, accel_ft\nfrom accel_ft.errors import UserError\n"
        f"keys = {job!r}\naccel_ft.fit(**keys)\n"
        "try:\n    accel_ft.fit(**keys)\nexcept UserError as error:\n"
        "    os.write(1, f'skipped: {error}\\n'.encode())\n"
        "accel_ft.fit(**keys | {'output_dir': keys['output_dir'] + '2'})\n"
    )
    done = launch("cpu_ddp.yaml", "--num_processes", 2, script)
    assert done.stdout.count("already holds a run") == 2
    assert (tmp_path / "run2/model/config.json").is_file()
    script.write_text(
        "import atexit, os, accel_ft\nfrom pathlib import Path\n"
        "from accel_ft.errors import UserError\nfrom torch import distributed as dist\n"
        "atexit.register(lambda: os.write(1, b'closed\\n' * (not dist.is_initialized())))\n"
        f"keys = {job!r} | {{'output_dir': {str(tmp_path / 'run3')!r}}}\nmkdir = Path.mkdir\n"
        "def fails(path, *words, **more):\n"
        "    if path.name == 'ranks' and os.environ['RANK'] == '1':\n"
        "        raise OSError('no room for it')\n"
        "    mkdir(path, *words, **more)\n"
        "Path.mkdir = fails\n"
        "try:\n    accel_ft.fit(**keys)\nexcept UserError as error:\n"
        "    os.write(1, f'skipped: {error}\\n'.encode())\n"
    )
    done = launch("cpu_ddp.yaml", "--num_processes", 2, script)
    assert done.stdout.count("run3: no room for it") == 2
    assert done.stdout.count("closed") == 2  # a thread of an open one may abort a rank at exit


def test_paths_that_the_terminal_cannot_encode(job: dict[str, Any], tmp_path: Path) -> None:
    words = [
        str(each) for key, value in job.items() if value is not None for each in (f"--{key}", value)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "accel_ft.train", *words, "--output_dir", str(tmp_path / "café")],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=240,
        check=True, cwd=ROOT,
    )  # fmt: skip
    assert r"caf\xe9" in done.stdout
    assert "predict: " in done.stdout

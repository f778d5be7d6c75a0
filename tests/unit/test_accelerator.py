"""Settings that accelerate would ignore or silently change, above all on a GPU; the tests need no GPU."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from conftest import ROOT, job_words, run
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from accel_ft.config import TrainConfig
from accel_ft.engine import agreement, build, evaluation
from accel_ft.errors import ConfigError, LaunchError
from accel_ft.model.memory import _container_bytes, device_bytes
from accel_ft.model.optim import allocate_state
from accel_ft.runtime import compiled, fsdp, gloo, launch
from accel_ft.runtime.request import (
    Request,
    launcher_words,
    own_launcher,
    read_request,
    refuse_impossible,
)
from accel_ft.train import main


@pytest.fixture(autouse=True)
def no_strategy_left() -> Iterator[None]:
    """Reset accelerate's state: what a test requests here, such as compile, must not affect later tests."""
    yield
    AcceleratorState._reset_state()


def test_ranks_on_the_cpu_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's mesh and accelerate's barrier would use the GPU even under use_cpu."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch.make_accelerator()
    assert launch.os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_float32_stays_float32_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True  # as accelerate does on a GPU
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        launch.make_accelerator()
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_compile_does_not_go_on_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its recompile limit, dynamo would only warn and run the function uncompiled; it must fail."""
    monkeypatch.setattr(compiled, "COMPILATIONS", 2)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        launch.make_accelerator()
        scaled = torch.compile(lambda x, factor: x * len(factor), backend="eager", dynamic=False)
        for count in (1, 2):
            scaled(torch.ones(1), [0] * count)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            scaled(torch.ones(1), [0] * 3)


def test_a_dynamic_width_is_not_bounded_by_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shape_padding, ptxas took 90 s for one kernel of BERT's last layer on a Hopper GPU, 125 s for its gradient."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    restored = torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False)
    with restored, torch._inductor.config.patch(shape_padding=True):
        launch.make_accelerator()
        assert torch._inductor.config.shape_padding
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
        launch.make_accelerator()
        assert not torch._inductor.config.shape_padding


def test_a_cache_of_another_user_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(tmp_path / "cache"))
    compiled._refuse_cache_of_another()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiled.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(LaunchError, match="cache: belongs to another user, and its code would be"):
        compiled._refuse_cache_of_another()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # named by the user
    compiled._refuse_cache_of_another()


COMPILE_WORKERS = """
import os, signal, time
from accel_ft.runtime.compiled import start_compile_workers
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
start_compile_workers()
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
from torch._inductor.async_compile import AsyncCompile
pool = AsyncCompile.process_pool()
pool.submit(time.sleep, 0).result()
working = pool.submit(time.sleep, 1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of this process; others' end is what is looked for
os.killpg(0, signal.SIGTERM)
working.result(timeout=30)
"""


def test_a_compilation_outlives_a_signal_to_all_processes() -> None:
    """A scheduler signals all processes of a job; inductor would wait for ever for a killed worker."""
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    run("python", "-c", COMPILE_WORKERS, env=env, start_new_session=True)


def test_the_launchers_own_file_does_not_count_under_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`accelerate launch --cpu` ignores default_config.yaml: its settings do not count as requested."""
    default = tmp_path / "default_config.yaml"
    default.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n"
                       "num_processes: 2\nmixed_precision: bf16\nuse_cpu: true\n")  # fmt: skip
    monkeypatch.setattr("accel_ft.runtime.request.default_config_file", str(default))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(default))
    monkeypatch.setattr(
        "accel_ft.runtime.request.find_launcher", lambda: (["-m", "accel_ft.train"], "/")
    )
    assert read_request().num_processes == 2
    monkeypatch.setattr(
        "accel_ft.runtime.request.find_launcher", lambda: (["--cpu", "-m", "accel_ft.train"], "/")
    )
    request = read_request()
    assert (request.num_processes, request.mixed_precision) == (None, "no")


@pytest.mark.parametrize(
    "start",
    [
        "/usr/bin/python /venv/bin/accelerate launch",
        "/venv/bin/accelerate-launch",
        "python -m accelerate.commands.launch",
        "python -X faulthandler -W ignore -m accelerate.commands.launch",
        "python -m accelerate.commands.accelerate_cli launch",
        "python -maccelerate.commands.launch",
        "python /venv/site-packages/accelerate/commands/launch.py",
        "accelerate launch",
    ],
)
def test_the_launcher_is_known_however_it_is_started(start: str) -> None:
    words = ["--config_file", "mine.yaml", "-m", "accel_ft.train"]
    assert launcher_words([*start.split(), *words]) == words
    for other in (
        "python -m accel_ft.train --output_dir runs/accelerate-launch",
        "python /venv/bin/torchrun --nproc_per_node 1 -m accel_ft.train accelerate launch",
        "python sweep.py --launcher accelerate launch",
        "python -X",
        "python",
        "accelerate config",
    ):
        assert launcher_words(other.split()) is None
    assert launcher_words([]) is None


def test_a_launcher_that_ended_before_its_rank_had_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher may be killed in the seconds that the libraries take to load; its rank must not train on."""
    from accel_ft import errors
    from accel_ft.runtime.watch import Watch

    assert errors.parent[0] > 0
    gone = 2**22 + 1, ["python", "/venv/bin/accelerate", "launch", "-m", "accel_ft.train"]
    monkeypatch.setattr(errors, "parent", gone)
    with pytest.raises(LaunchError, match="the launcher ended before this rank had started"):
        launch.make_training_accelerator(60)
    left = []
    monkeypatch.setattr("accel_ft.runtime.watch.os._exit", left.append)
    with Watch(tmp_path, 0, 1, 60) as watch:
        watch.stage("step 1", can_save=True)
        deadline = time.monotonic() + 10
        while not watch.stop_signal and time.monotonic() < deadline:
            time.sleep(0.05)
    assert (watch.stop_signal, left) == (signal.SIGTERM, [])  # it saves a checkpoint first
    monkeypatch.setattr(errors, "parent", (gone[0], ["-bash"]))  # a shell may end first
    assert own_launcher() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert own_launcher() is None
    monkeypatch.setattr(errors, "parent", (gone[0], ["python", "notebook.py"]))
    assert own_launcher() == gone[0]


def test_a_forked_process_has_another_parent() -> None:
    """`notebook_launcher` forks its ranks: after a fork, `errors.parent` is the process that forked."""
    from accel_ft import errors

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(errors.parent[0]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 20)) == os.getpid()


@pytest.mark.parametrize(
    ("ranks", "by_layers", "refused"), [("2", "no", True), ("2", "yes", False), ("1", "no", False)]
)
def test_a_whole_graph_under_ddp(
    ranks: str, by_layers: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {
        "ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": by_layers, "WORLD_SIZE": ranks,
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    told = pytest.raises(LaunchError, match="dynamo_use_fullgraph under DDP")
    with told if refused else contextlib.nullcontext():
        refuse_impossible(Request("x", None, True, "NO", "no"), on_cpu=True)


def test_a_process_has_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.make_accelerator()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = launch.make_accelerator()
    with pytest.raises(LaunchError, match=r"mixed_precision .a process keeps .*: bf16 asked, no"):
        launch.check_granted(accelerator, accelerator.prepare(torch.nn.Linear(1, 1)))


def test_a_rank_that_waits_for_others_ends_with_its_launcher() -> None:
    """Without the launcher no other rank can start: the rank must not wait for them for ever."""
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        pid = os.getpid()  # noted now: it may have ended when the rank asks
        if os.fork() == 0:
            from accel_ft import errors

            os.dup2(writing, 2)
            errors.parent = pid, ["accelerate", "launch", "-m", "accel_ft.train"]
            with launch._meeting():
                time.sleep(30)
        os._exit(0)
    os.close(writing)
    os.waitpid(launcher, 0)
    with open(reading) as said:
        assert said.read() == "error: the launcher ended before this rank had started\n"


def test_ranks_that_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(**_: object) -> None:
        deadline = time.monotonic() + 10
        while "waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
        raise dist.DistStoreError("Timed out. 1/2 clients joined.")

    monkeypatch.setattr(launch, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(launch, "Accelerator", wait)
    address = {"MASTER_ADDR": "HOST0", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
    for key, value in address.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(
        LaunchError, match="connect at HOST0:29500: .* 1/2 clients joined. Fix: start"
    ):
        launch.make_accelerator()
    assert "waiting for the other ranks at HOST0:29500" in caplog.text

    def lack_memory(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(launch, "Accelerator", lack_memory)
    with pytest.raises(torch.OutOfMemoryError):  # not a failure to connect
        launch.make_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(LaunchError, match="the environment: .* invalid literal .*'two'"):
        launch.make_accelerator()


def test_tasks_of_srun_that_train_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(launch, "make_accelerator", lambda **_: made)
    launch.make_training_accelerator(60)
    assert not caplog.text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    launch.make_training_accelerator(60)
    assert "srun's task 1 of 2 trains alone" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gradient_accumulation_steps 4", "only. Fix: leave it out; after -m, --gradient_acc"),
        ("--zero_stage 3", "launch --zero_stage: is for DeepSpeed only. Fix: leave it out$"),
        ("--cpu --use_megatron_lm", "launch --use_megatron_lm: accel_ft does not support it"),
        ("--parallelism_config_tp_size 2", "is for ParallelismConfig only"),
        ("--downcast_bf16 --multi_gpu", "is for TPU only"),
        ("--cpu --fsdp_version 2", "--fsdp_version: is for FSDP only. .*; or --use_fsdp"),
        ("--use_fsdp --fsdp_version 2", ""),
        ("--fp8_backend te", "--fp8_backend: is for FP8 only"),
        ("--fp8_backend te --mixed_precision fp8", ""),  # refused later, because of fp8
        ("--megatron_lm_tp_degree 2", "is for Megatron-LM only"),
        ("--aws_access_key_id x", "is for AWS only"),
        ("--use_deepspeed --cpu", "launch --use_deepspeed: accel_ft does not"),
        ("--tpu", "launch --tpu: accel_ft does not"),
        ("--num_machines 2 --num_processes 2", "num_machines: 2, num_processes: 2, .*: NO. Fix"),
        (
            "--num_machines 2 --num_processes 3 --multi_gpu",
            "Fix: equally many processes per machine",
        ),
        ("--num_machines 2 --num_processes 4 --multi_gpu", ""),
        ("WORLD_SIZE=4 --num_machines 2 --num_processes 4 --rdzv_backend c10d", ""),  # found GPUs
    ],
)
def test_options_of_another_strategy(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """accelerate accepts options of a strategy that is not in use, and ignores them: they are refused."""
    monkeypatch.setattr("accel_ft.runtime.request.default_config_file", str(tmp_path / "none"))
    if words.startswith("WORLD_SIZE"):
        monkeypatch.setenv("WORLD_SIZE", "4")
        words = words.partition(" ")[2]
    given = [*words.split(), "-m", "accel_ft.train"]
    monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (given, "/"))
    with pytest.raises(LaunchError, match=message) if message else contextlib.nullcontext():
        read_request()


@pytest.mark.parametrize(("value", "is_cpu"), [("'no'", False), ("'true'", True), ("true", True)])
def test_a_truth_in_quotes(
    value: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: '2'\n"
        f"use_cpu: {value}\n"
    )
    words = ["--config_file", str(file), "-m", "accel_ft.train"]
    monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (words, "/"))
    request = read_request()
    assert (request.use_cpu, request.num_processes) == (is_cpu, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("fsdp_config: {fsdp_version: 2}", "fsdp_config has no effect under .*MULTI_GPU. Fix"),
        ("mixed_precision: fp8\nfp8_config: {backend: TE}", ""),  # refused later, because of fp8
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}", ""),
        ("deepspeed_config: {zero_stage: 2}", "deepspeed_config has no effect"),
        ("downcast_bf16: true", "downcast_bf16: True has no effect. Fix: leave it out$"),
        (
            "rdzv_backend: c10d",
            "rdzv_backend: c10d has no effect. .*, or `accelerate launch --rdzv_b",
        ),
        ("tpu_name: mine\nenable_cpu_affinity: false", "tpu_name: mine has no effect. .* out$"),
        ("rdzv_backend: static\nmain_training_function: main\ntpu_env: []\ndebug: true", ""),
        ("dynamo_config: INDUCTOR", "dynamo_config: INDUCTOR is no mapping"),
        ("parallelism_config: {parallelism_config_tp_size: 2}", ""),  # the ranks refuse it
        ('distributed_type: "NO"\nparallelism_config: {tp_size: 2}', "_config has no effect"),
        ("distributed_type: MULTI_CPU\nfsdp_config: {fsdp_version: 2}", "under .*: MULTI_CPU"),
        ("distributed_type: MULTI_CPU\nmpirun_config: {mpirun_hostfile: hosts}", ""),
        ("dynamo_config: {dynamo_backnd: INDUCTOR}", "no dynamo_backnd. .*`dynamo_backend`"),
        (
            "distributed_type: FSDP\nfsdp_config: {reshard_after_foward: false}",
            "no reshard_after_foward. .*`fsdp_reshard_after_forward`",
        ),
        ("dynamo_config: {use_dynamic: true, dynamo_mode: default}\nmegatron_lm_config: {}", ""),
        ("distributed_type: FSDP\nfsdp_config: {version: 2}\ndowncast_bf16: 'no'", ""),
    ],
)
def test_sections_of_the_yaml_that_nobody_heeds(
    lines: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """accelerate refuses unknown keys at the top level, but ignores them in a section, and ignores whole sections."""
    file = tmp_path / "mine.yaml"
    plain = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
    file.write_text(plain + lines + "\n")
    words = ["--config_file", str(file), "-m", "accel_ft.train"]
    monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (words, "/"))
    if not message:
        read_request()
        return
    if "rdzv" in lines:
        said = ["--rdzv_backend", "c10d", *words]
        monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (said, "/"))
        read_request()
        monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (words, "/"))
    if "fsdp_version" in lines:  # it is read if the command line asks for FSDP
        monkeypatch.setattr(
            "accel_ft.runtime.request.find_launcher", lambda: (["--use_fsdp", *words], "/")
        )
        assert read_request().distributed_type == "FSDP"
        monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (words, "/"))
    with pytest.raises(LaunchError, match=message):
        read_request()


def test_ranks_are_compared_by_what_decides_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths may differ between machines, and only rank 0 uses trackers: neither is compared."""
    monkeypatch.setattr(agreement, "about_strategy", lambda _: {"mixed_precision": "bf16"})
    monkeypatch.setattr(agreement, "version", lambda name: "2")
    seen: list[Any] = []

    def compare(config: TrainConfig, **others: Any) -> None:
        def all_gather(mine: Any) -> list[Any]:
            seen.append(mine)
            return [seen[0], mine | others]

        agreement.refuse_other_jobs(config, None, SimpleNamespace(all_gather=all_gather))

    compare(TrainConfig(output_dir=Path("a"), train_file=__file__))
    compare(TrainConfig(output_dir=Path("b"), train_file=launch.__file__, report_to="none"))
    for others, told in (
        ({"code of accel_ft (SHA-256)": "ab"}, "SHA-256.: [0-9a-f]{64} on rank 0, ab on rank 1$"),
        ({"torch": "3"}, "torch: 2 on rank 0, 3 on rank 1$"),
        (dict.fromkeys(TrainConfig().model_dump(), 0), r"and \d+ more$"),
    ):
        with pytest.raises(ConfigError, match=told):
            compare(TrainConfig(), **others)
    with pytest.raises(ConfigError, match="resume.*: None on rank 0, latest on rank 1$"):
        compare(TrainConfig(resume_from_checkpoint="latest"))
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ConfigError, match="FSDP_VERSION: None on rank 0, 2 on rank 1$"):
        compare(TrainConfig())


def test_no_processes_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Request("mine.yaml", 0, None, "NO", "no")
    monkeypatch.setattr(launch, "read_request", lambda: asked)
    with pytest.raises(
        LaunchError, match="mine.yaml asks for 0 processes, but the process group has 1"
    ):
        launch.make_accelerator()


def test_the_launchers_file_is_named_from_where_it_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative path starts in the launcher's folder; the program may have changed its own folder."""
    (tmp_path / "mine.yaml").write_text((ROOT / "accelerate_configs/cpu_ddp.yaml").read_text())
    words = ["--config_file", "mine.yaml", "-m", "accel_ft.train"]
    monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: (words, str(tmp_path)))
    request = read_request()
    assert (request.source, request.num_processes) == ("mine.yaml", 2)


def test_the_environment_is_read_as_accelerate_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the request might be read as FSDP while accelerate runs DDP on the CPU."""
    monkeypatch.setattr("accel_ft.runtime.request.find_launcher", lambda: None)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "True")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "on")
    request = read_request()
    assert (request.distributed_type, request.use_cpu) == ("FSDP", True)


def test_what_was_asked_for_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's YAML may be edited for the next job while this job tokenises its rows."""
    accelerator = launch.make_accelerator()
    monkeypatch.setattr(launch, "read_request", lambda: pytest.fail("read again"))
    launch.check_granted(accelerator, nn.Linear(1, 1))


def test_a_second_model_under_fsdp_has_a_plugin_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """accelerate keeps the first model's plugin in a singleton, with the layer classes derived from that model."""
    monkeypatch.setattr(launch, "read_request", lambda: Request("x", 1, None, "FSDP", "no"))
    monkeypatch.setattr(launch, "refuse_impossible", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    made = SimpleNamespace(
        distributed_type=DistributedType.FSDP, num_processes=1, mixed_precision="bf16",
        device=torch.device("cpu"),
    )  # fmt: skip
    monkeypatch.setattr(launch, "Accelerator", lambda **_: made)
    renewed: list[object] = []
    monkeypatch.setattr(fsdp, "make_real", renewed.append)
    launch.make_accelerator()
    assert renewed == [made]


def test_a_gpu_that_is_left_idle_is_no_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps the device of a process's first Accelerator: if that was the CPU, the GPU would stay idle."""
    accelerator = launch.make_training_accelerator(60)
    assert accelerator.device.type == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(launch, "asked_for", lambda: (accelerator.asked, False))
    with pytest.raises(LaunchError, match="an earlier Accelerator in this process did"):
        launch.make_training_accelerator(60)
    on_cpu = replace(accelerator.asked, use_cpu=True)
    monkeypatch.setattr(launch, "asked_for", lambda: (on_cpu, True))
    launch.make_training_accelerator(60)


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    assert _container_bytes(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\nactive_file 150\ninactive_file 250\n")
    assert _container_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_bytes(tmp_path) == sys.maxsize


def test_a_gpu_has_what_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free on the GPU, and what this process's allocator has reserved (30 bytes) but does not use (20)."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert device_bytes(torch.device("cuda")) == 110


@pytest.mark.parametrize(
    ("backend", "mode", "message"),
    [
        ("INDUCTOR", "max-autotun", "dynamo_mode: max-autotun. Allowed: default, reduce-overhead,"),
        ("EAGER", "max-autotune", "dynamo_mode: max-autotune, which EAGER ignores"),
        ("CUDAGRAPHS", "default", "CUDA graphs .* on the CPU"),
        ("INDUCTOR", "reduce-overhead", "CUDA graphs .* on the CPU"),
        ("INDUCTOR", "max-autotune", ""),
    ],
)
def test_compile_modes_without_effect(
    backend: str, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
    with pytest.raises(LaunchError, match=message) if message else contextlib.nullcontext():
        refuse_impossible(Request("mine.yaml", 1, None, "NO", "no"), on_cpu=True)
    if not message or message.startswith("CUDA graphs"):
        refuse_impossible(Request("mine.yaml", 1, None, "NO", "no"), on_cpu=False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_DYNAMO_BACKEND": "ONNXRT"}, "dynamo_backend: ONNXRT: torch has no such backend"),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "0", "FSDP_VERSION": "2",
          "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_STATE_DICT_TYPE": "SHARDED"},
         "accelerate cannot start: there is no 'SHARDED'"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_USE_DYNAMIC": "maybe"},
         "accelerate cannot start: invalid truth value maybe"),
        ({"ACCELERATE_DYNAMO_BACKEND": "foo"}, "accelerate cannot start: 'FOO' is not a valid Dyn"),
        ({"ACCELERATE_MIXED_PRECISION": "foo"}, "asks for mixed_precision: foo. Allowed"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
         "no launcher started this process. Fix: accelerate launch, or"),
        ({"LOCAL_WORLD_SIZE": "abc"}, "accelerate cannot start: invalid literal"),
    ],
)  # fmt: skip
def test_words_that_accelerate_does_not_know(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=message):
        launch.make_accelerator()


def test_the_command_line_may_forbid_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
        "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_dynamic: true}\n"
    )
    words = ["--config_file", str(file), "-m", "accel_ft.train"]
    for more, is_eager in (([], False), (["--dynamo_backend", "no"], True)):
        monkeypatch.setattr(
            "accel_ft.runtime.request.find_launcher", lambda more=more: ([*more, *words], "/")
        )
        assert read_request().is_eager is is_eager


def test_fsdp_in_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        LaunchError, match="MULTI_GPU, but the environment sets ACCELERATE_USE_FSDP"
    ):
        refuse_impossible(Request("ddp.yaml", 2, True, "MULTI_GPU", "no"), on_cpu=True)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would put two ranks on one device, and NCCL would report duplicate GPUs."""
    request = replace(read_request(), use_cpu=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    refuse_impossible(request, on_cpu=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        LaunchError, match="2 processes on this machine, but this one sees only 1 devices"
    ):
        refuse_impossible(request, on_cpu=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP", "which FSDP2 ignores. Fix: leave it out"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "Fix: TRANSFORMER_BASED_WRAP"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params on the CPU, where"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "Fix: leave it out; gradient_checkpointing"),
        ("FSDP_FORWARD_PREFETCH", "true", "fsdp_forward_prefetch or"),
        ("FSDP_BACKWARD_PREFETCH", "BACKWARD_POST", "fsdp_backward_prefetch, which FSDP2 ignores"),
        ("FSDP_BACKWARD_PREFETCH", "NO_PREFETCH", "fsdp_backward_prefetch, which FSDP2 ignores"),
        ("FSDP_BACKWARD_PREFETCH", "2", "fsdp_backward_prefetch, which FSDP2 ignores"),
        ("FSDP_BACKWARD_PREFETCH", "3", "fsdp_backward_prefetch, which FSDP2 ignores"),
        ("FSDP_VERSION", "3", "fsdp_version: 3. Allowed: 2, or 1"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "BertLayer", "Fix: fsdp_auto_wrap_policy: TRANSFORMER_B"),
        ("ACCELERATE_USE_FSDP", "false", "FSDP, which the launcher did not pass on, as with --cpu"),
        ("ACCELERATE_USE_DEEPSPEED", "1", "fsdp2.yaml asks for DeepSpeed or Megatron"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "fsdp2.yaml asks for DeepSpeed or Megatron"),
        ("ACCELERATE_DYNAMO_MODE", "max-autotune", "without a dynamo_backend: nothing is compiled"),
        ("ACCELERATE_DYNAMO_USE_DYNAMIC", "1", "without a dynamo_backend: nothing is compiled"),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1", "without a dynamo_backend: nothing is compiled"),
        ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1", "without a dynamo_backend: nothing is"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "1", "asks for a parallelism_config"),
        ("ACCELERATE_USE_FSDP", "1", "accelerate accepts only true. Fix: ACCELERATE_USE_FSDP=true"),
    ],
)
def test_what_would_be_passed_over_is_refused(
    key: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate passes these settings to the ranks as variables; FSDP2 ignores them, or fails deep inside."""
    request = Request("fsdp2.yaml", 2, True, "FSDP", "no")
    sound = {
        "FSDP_VERSION": "2",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_OFFLOAD_PARAMS": "false",
        "ACCELERATE_USE_FSDP": "true",
    }
    for name, each in sound.items():
        monkeypatch.setenv(name, each)
    refuse_impossible(request, on_cpu=True)
    monkeypatch.setenv(key, value)
    with pytest.raises(LaunchError, match=message):
        refuse_impossible(request, on_cpu=True)
    if "DYNAMO" in key:  # allowed if the command line disables compilation
        refuse_impossible(replace(request, is_eager=True), on_cpu=True)
    if "CLS_TO_WRAP" in key:
        for policy, is_well in (("TRANSFORMER_BASED_WRAP", True), ("NO_WRAP", False)):
            monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", policy)
            told = (
                contextlib.nullcontext() if is_well else pytest.raises(LaunchError, match=message)
            )
            with told:
                refuse_impossible(request, on_cpu=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "FSDP_RESHARD_AFTER_FORWARD",
            "HYBRID_SHARD",
            "which FSDP1 ignores. Fix: leave it out",
        ),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "only rank 0 has an initialized head"),
        ("FSDP_USE_ORIG_PARAMS", "false", "Fix: fsdp_use_orig_params: true"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "Fix: leave it out; gradient_checkpointing"),
    ],
)
def test_what_fsdp1_would_pass_over_is_refused(
    key: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last three are accelerate's defaults, or answers to the questions of `accelerate config`."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    request = Request("fsdp1.yaml", 2, False, "FSDP", "bf16")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")  # the launcher's default
    refuse_impossible(request, on_cpu=False)
    monkeypatch.setenv(key, value)
    with pytest.raises(LaunchError, match=message):
        refuse_impossible(request, on_cpu=False)


def test_fsdp1_asked_for_one_sharding_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate config` writes the first key, which FSDP1 ignores; the second, which it reads, says the same."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    request = Request("fsdp1.yaml", 2, False, "FSDP", "bf16")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "yes")
    for key in ("FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY"):
        monkeypatch.setenv(key, "SHARD_GRAD_OP")
    refuse_impossible(request, on_cpu=False)


def test_cuda_graphs_are_refused_where_gradients_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients would lie in the graphs' memory, which the next micro-batch overwrites."""
    on_gpu = torch.device("cuda")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    compiled.refuse_cuda_graphs(on_gpu)
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    compiled.refuse_cuda_graphs(torch.device("cpu"))
    with pytest.raises(LaunchError, match="Fix: dynamo_backend: INDUCTOR in dynamo_mode: default"):
        compiled.refuse_cuda_graphs(on_gpu)


def test_what_is_compiled_may_be_part_of_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """If inductor compiles it, in a mode that does not record CUDA graphs itself."""
    assert compiled.can_record_compiled()
    for backend, mode, can in (
        ("INDUCTOR", "default", True),
        ("INDUCTOR", "max-autotune-no-cudagraphs", True),
        ("INDUCTOR", "reduce-overhead", False),
        ("CUDAGRAPHS", "default", False),
        ("AOT_EAGER", "default", False),
    ):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
        assert compiled.can_record_compiled() == can
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    assert not compiled.can_record_compiled()
    with pytest.raises(LaunchError, match="without TORCHINDUCTOR_CUDAGRAPHS"):
        compiled.refuse_cuda_graphs(torch.device("cuda"))


def test_dynamic_shapes_are_compiled_once_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled.compiles_each_width()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    for dynamic, each in ((None, True), ("false", True), ("true", False)):
        if dynamic:
            monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", dynamic)
        assert compiled.compiles_each_width() == each


@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_batches_of_few_widths_where_each_is_compiled(
    dynamic: str,
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With static shapes each width costs a compilation: padding allows only a few."""
    seen = []

    def padding(*given: Any) -> None:
        seen.append(given[-1])
        raise LaunchError("seen")

    monkeypatch.setattr(build, "Padding", padding)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", dynamic)
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    restored = torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False)
    with restored, pytest.raises(LaunchError, match="seen"):
        main(words)
    assert seen == [dynamic == "false"]


def test_float32_is_float32_in_convolutions_too() -> None:
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    launch.make_accelerator()
    assert not torch.backends.cudnn.allow_tf32


def test_a_loss_scale_does_not_go_with_offloaded_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host would read the loss scale before its copy from the GPU has finished."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    request = Request("fsdp2_offload.yaml", 2, False, "FSDP", "bf16")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    refuse_impossible(request, on_cpu=False)
    with pytest.raises(LaunchError, match="with mixed_precision: fp16"):
        refuse_impossible(replace(request, mixed_precision="fp16"), on_cpu=False)


def test_gloo_groups_have_one_worker(tmp_path: Path) -> None:
    """Two workers would race for one std::string; with sparse sums, the heap is corrupt within seconds."""
    launch.make_accelerator()
    start = f"file://{tmp_path}/x"
    dist.init_process_group(
        "gloo", init_method=start, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        for group, seconds in (dist.group.WORLD, 77), (dist.new_group(backend="gloo"), 1800):
            options = group._get_backend(torch.device("cpu")).options
            assert (options._threads, options._timeout.total_seconds()) == (1, seconds)
            assert dist.all_reduce(torch.ones(1), group=group) is None
    finally:
        dist.destroy_process_group()


def test_the_interfaces_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLOO_SOCKET_IFNAME is parsed as torch parses it: one device per interface."""
    for names, number in ("", 1), ("lo", 1), ("lo,lo", 2):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        assert len(gloo._devices(dist.ProcessGroupGloo)) == number
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_of_that_name")
    with pytest.raises(RuntimeError, match="none_of_that_name"):
        gloo._devices(dist.ProcessGroupGloo)


def test_a_probe_of_padding_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only decides about a warning: it must not take minutes, and its failure must not stop the run."""
    seen: list[Any] = []

    def forward(_: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch)
        raise RuntimeError("wants a GPU")

    monkeypatch.setattr(build, "forward", forward)
    monkeypatch.setattr(build, "collate", lambda split, places, pad: {"labels": torch.zeros(3)})
    for length, tries in ((190, 1), (210, 0)):
        split: Any = type(
            "Split", (list,), {"lengths": lambda self, places: np.array(self)[places]}
        )
        pad: Any = SimpleNamespace(left=False)
        assert not build._reads_padding(nn.Linear(1, 1), split([length] * 16), pad)
        assert (len(seen), seen[:1]) == (tries, [{}] * tries)
        seen.clear()


def test_logits_that_the_next_batch_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs (dynamo_mode: reduce-overhead) write the logits of each batch to the same memory."""
    buffer = torch.zeros(2, 3)
    monkeypatch.setattr(
        evaluation, "forward", lambda _, batch: buffer.copy_(batch["places"][:, None])
    )
    accelerator = SimpleNamespace(
        autocast=contextlib.nullcontext,
        gather=lambda rows: rows,
        pad_across_processes=lambda rows, **_: rows,
    )

    class Loader(list[dict[str, torch.Tensor]]):
        dataset = SimpleNamespace(split=range(6))

        def end(self) -> None:
            """accelerate's loaders have this method."""

    loader = Loader({"places": torch.tensor([start, start + 1])} for start in (0, 2, 4))
    logits = evaluation.predict_split(accelerator, nn.Identity(), loader)
    assert logits[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    loader.dataset.split = range(7)
    with pytest.raises(RuntimeError, match="evaluation of 7 samples returned 6 predictions"):
        evaluation.predict_split(accelerator, nn.Identity(), loader)


def test_masked_attention_is_not_left_to_cudnn() -> None:
    """With a mask, the gradients of cuDNN's attention are NaN for some widths."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    launch.make_accelerator()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore::FutureWarning")
def test_a_new_fsdp1_has_moments_to_load_into(tmp_path: Path) -> None:
    """Loading optimizer state, FSDP1 silently skips parameters that have no moments yet: they are allocated first."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(
            nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            assert not FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            weights = [p.clone() for p in model.parameters()]
            allocate_state(optimizer)
            moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        assert set(moments) == {"weight", "bias"}
        assert all(state["step"] == 0 for state in moments.values())
        assert all(map(torch.equal, model.parameters(), weights))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.MULTI_GPU])
def test_who_leaves_an_overflowed_step_out(kind: DistributedType) -> None:
    """Under FSDP the scaler, which does not step then; elsewhere the fused kernel, which gets the overflow flag."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    told: list[bool] = []
    optimizer.register_step_pre_hook(lambda it, *_: told.append(hasattr(it, "found_inf")))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accelerator = SimpleNamespace(scaler=scaler, distributed_type=kind)
    fsdp.leave_overflows_to_the_scaler(accelerator, optimizer)
    for gradient, moves in (torch.inf, False), (1.0, True):
        before = weight.detach().clone()
        scaler.scale(weight.sum() * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight, before) is not moves
    assert told == ([False] if kind == DistributedType.FSDP else [True, True])

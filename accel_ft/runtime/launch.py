"""Build the `Accelerator`, and raise if what runs is not exactly what was requested."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    is_compiled_module,
)
from torch import nn

from accel_ft.errors import LaunchError, in_one_line
from accel_ft.runtime import fsdp
from accel_ft.runtime.compiled import configure, is_compiled, start_compile_workers
from accel_ft.runtime.gloo import give_groups_one_worker
from accel_ft.runtime.memory import keep_freed_memory
from accel_ft.runtime.request import (
    ENVIRONMENT,
    Request,
    own_launcher,
    read_request,
    refuse_impossible,
    world_size,
)

logger = logging.getLogger(__name__)

MIXED_PRECISION = "mixed_precision (a process keeps the one it began with)"
LAUNCHER_GONE = "the launcher ended before this rank had started"
QUIET_SECONDS = 20.0  # rank 0 reports a rendezvous that takes longer


def asked_for() -> tuple[Request, bool]:
    """Return the request, and whether it runs on the CPU; there, make malloc keep freed memory.

    Raises:
        LaunchError: the request cannot be met.
    """
    try:
        request = read_request()
    except ValueError as error:
        raise LaunchError(f"{ENVIRONMENT}: accelerate cannot start: {error}") from error
    on_cpu = bool(request.use_cpu) or not torch.accelerator.is_available()
    if on_cpu:
        keep_freed_memory()
    try:
        refuse_impossible(request, on_cpu)
    except ValueError as error:
        raise LaunchError(f"{request.source}: accelerate cannot start: {error}") from error
    return request, on_cpu


def make_accelerator(**kwargs: Any) -> Accelerator:
    """Build the requested `Accelerator`.

    Args:
        kwargs: passed to `Accelerator`.

    Raises:
        LaunchError: it cannot be built; names what was requested, what was found and the fix.
    """
    give_groups_one_worker()
    request, on_cpu = asked_for()
    if request.use_cpu:  # else FSDP2 and barriers would still use the GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A day: evaluation and prediction may wait for a slow rank, or for standard input.
    kwargs.setdefault("kwargs_handlers", [InitProcessGroupKwargs(timeout=timedelta(days=1))])
    data = DataLoaderConfiguration(non_blocking=True)
    try:
        with _meeting():
            accelerator = Accelerator(cpu=on_cpu, dataloader_config=data, **kwargs)
        is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        if request.distributed_type == "FSDP" and (on_cpu or is_fsdp):
            fsdp.make_real(accelerator)
    except (ValueError, KeyError) as error:  # a bad value in the environment
        why = f"there is no {error}" if isinstance(error, KeyError) else error
        raise LaunchError(f"{request.source}: accelerate cannot start: {why}") from error
    except RuntimeError as error:
        is_device = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
        if is_device or world_size() == 1:
            raise
        why = in_one_line(error).rstrip(".")
        raise LaunchError(
            f"the ranks could not connect at {_meeting_place()}: {why}. Fix: start "
            "it on all machines, with the same --main_process_ip and --main_process_port; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME=the network interface that joins them"
        ) from error
    # Drop accelerate's harmless warning at each save of a model that shares embeddings, as T5 does.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # With a mask, cuDNN attention's backward pass gives NaN on Hopper GPUs (PyTorch issue 196678).
    # Without it torch uses its flash or memory-efficient kernel.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if accelerator.mixed_precision == "no":
        torch.backends.cudnn.allow_tf32 = False  # for convolutions torch's default is TF32
    if is_compiled():
        configure(accelerator.mixed_precision)
    # Kept for `check_granted`: by then the YAML may have been edited for the next job.
    accelerator.asked = request
    asked = request.num_processes
    if asked is not None and asked >= 0 and accelerator.num_processes != asked:
        raise LaunchError(
            f"{request.source} asks for {asked} processes, but the process group has "
            f"{accelerator.num_processes}. Fix: for several, accelerate_configs/ddp.yaml or "
            "fsdp2.yaml, on the CPU cpu_ddp.yaml or cpu_fsdp2.yaml; in a YAML of your own set "
            "distributed_type: MULTI_GPU, and use_cpu: true for the CPU"
        )
    return accelerator


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """During the rendezvous: exit if the launcher ends; rank 0 says if it waits for the others."""
    launcher, started, met = own_launcher(), time.monotonic(), threading.Event()
    tells = world_size() > 1 and os.environ.get("RANK") == "0"

    def look() -> None:
        is_told = not tells
        while not met.wait(1.0):
            if launcher not in (None, os.getppid()):
                os.write(2, f"error: {LAUNCHER_GONE}\n".encode())
                os._exit(LaunchError.exit_code)
            if not is_told and time.monotonic() - started > QUIET_SECONDS:
                is_told = True
                logger.warning("waiting for the other ranks at %s", _meeting_place())

    threading.Thread(target=look, name="accel_ft meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _meeting_place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def make_training_accelerator(timeout_seconds: float, **kwargs: Any) -> Accelerator:
    """Build the `Accelerator` that training runs on.

    Args:
        timeout_seconds: after which the watch counts a rank that does not arrive as lost.
        kwargs: passed to `Accelerator`.

    Raises:
        LaunchError: as `make_accelerator`.
    """
    if own_launcher() not in (None, os.getppid()):  # without a launcher the rendezvous hangs
        raise LaunchError(LAUNCHER_GONE)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in os.environ:
        logger.warning(
            "srun's task %s of %s trains alone: for one job over all tasks, see "
            "examples/slurm/train.sbatch", os.environ.get("SLURM_PROCID"), tasks,
        )  # fmt: skip
    accelerator = make_accelerator(
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # Later than the watch, which names the missing rank; NCCL would only abort.
            InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds + 30)),
        ],
        **kwargs,
    )
    if accelerator.device.type == "cpu" and not (
        accelerator.asked.use_cpu or not torch.accelerator.is_available()
    ):
        raise LaunchError(
            "there is a GPU, but accelerate uses the CPU: an earlier Accelerator in this process "
            "did, or ACCELERATE_TORCH_DEVICE says so. Fix: a new process; or, to use the CPU, "
            "`accelerate launch --cpu`, without a launcher ACCELERATE_USE_CPU=true"
        )
    if is_compiled() and accelerator.device.type == "cuda":
        start_compile_workers()
    return accelerator


def check_granted(accelerator: Accelerator, model: nn.Module) -> None:
    """Compare what `prepare` made with the request; called before the first update.

    Args:
        accelerator: from `make_accelerator`.
        model: prepared by it.

    Raises:
        LaunchError: lists the differences.
    """
    request: Request = accelerator.asked
    on_cpu = accelerator.device.type == "cpu"
    alone = (request.num_processes or accelerator.num_processes) == 1
    wraps_one = accelerator.distributed_type == DistributedType.MULTI_CPU  # DDP, unlike on one GPU
    one_or_ddp = "one process" if alone and not wraps_one else "DDP"
    strategy = "FSDP" if request.distributed_type == "FSDP" else one_or_ddp
    compiled = any(
        is_compiled_module(module) or module._compiled_call_impl is not None  # FSDP2: in place
        for module in model.modules()
    )
    asked_cpu = on_cpu if request.use_cpu is None else request.use_cpu
    compared: list[tuple[str, Any, Any]] = [
        ("strategy", strategy, fsdp.strategy_of(model)),
        (MIXED_PRECISION, request.mixed_precision, accelerator.mixed_precision),
        ("compile", is_compiled(), compiled),
        ("use_cpu", asked_cpu, on_cpu),
    ]
    differences = [
        f"{key}: {asked} asked, {found} found" for key, asked, found in compared if found != asked
    ]
    if differences:
        told = f"what runs is not what {request.source} asks for"
        raise LaunchError("\n  ".join([f"{told}:", *differences]))

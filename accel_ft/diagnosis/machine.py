"""The machine: versions, devices, links between ranks, limits, clocks, disk, Hub, loader speed."""

import importlib.metadata
import math
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from accel_ft.diagnosis.finding import Finding, Verdict, check, gather, num_ranks
from accel_ft.errors import listed
from accel_ft.runtime.hub import hub_reachable

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "numpy")
MIB = 2**20
OPEN_FILES = 1024
REDUCED_BYTES = (4 * 1024, MIB, 16 * MIB)
TIMED_BATCHES = 8
SHARED_BYTES = 256 * MIB
SKEW_SECONDS = 2.0
SLOW = 1.25  # times float32's time, above which a precision is called slow
TIMED_PRODUCTS, TIMED_SECONDS = 5, 0.5


@check("versions")
def versions() -> Finding:
    """Compare the versions of the libraries over the ranks. Collective."""
    ranks = gather({name: importlib.metadata.version(name) for name in PACKAGES})
    differing = [name for name in PACKAGES if len({rank[name] for rank in ranks}) > 1]
    if differing:
        words = [f"{name} {' / '.join(rank[name] for rank in ranks)}" for name in differing]
        judged = Verdict.FAIL if "torch" in differing else Verdict.WARN
        return judged(listed(words), "install the same versions on every machine")
    return Verdict.PASS(", ".join(f"{name} {ranks[0][name]}" for name in PACKAGES))


@check("device")
def devices(device: torch.device, precision: str) -> Finding:
    """Describe each rank's device; check that `precision` (no, bf16, fp16) is fast. Collective."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        place = str(torch.cuda.get_device_properties(device).uuid)
    else:
        name, place = f"{device.type}, {torch.get_num_threads()} threads", ""
    ranks = gather((name, product_time(device, precision), place))
    about = f"{len(ranks)} x {listed(sorted({name for name, _, _ in ranks}))}"
    if dist.is_initialized():
        about += f", {dist.get_backend()}"
    places = [place for _, _, place in ranks if place]
    if len(set(places)) < len(places):
        return Verdict.FAIL(
            f"several ranks on one device: {listed(places, 8)}",
            "LOCAL_RANK selects the GPU: start one process per GPU",
        )
    if precision == "no":
        return Verdict.PASS(about)
    slowest = max(times for _, times, _ in ranks)
    about += (
        f"; a product of matrices in {precision} takes {slowest:.2f} times as long as in float32"
    )
    if slowest > SLOW:
        return Verdict.WARN(about, "in a new run mixed_precision: no, on a GPU maybe fp16")
    return Verdict.PASS(about)


def product_time(device: torch.device, precision: str) -> float:
    """Return the time of a matrix product in `precision` (no, bf16, fp16) divided by float32's. A
    CPU may have no instructions for it, or (Sapphire Rapids without AMX) slow ones.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if kind is None:
        return 1.0
    side = 1024 if device.type == "cpu" else 2048
    fastest, begun = {kind: math.inf, torch.float32: math.inf}, time.perf_counter()
    for number in range(TIMED_PRODUCTS):  # alternately
        for each, seconds in fastest.items():
            matrix = torch.ones(side, side, dtype=each, device=device)
            matrix[0, 0].item()  # waits for the device
            start = time.perf_counter()
            (matrix @ matrix.T)[0, 0].item()
            fastest[each] = min(seconds, time.perf_counter() - start)
        if number and time.perf_counter() - begun > TIMED_SECONDS:  # the first loads kernels
            break
    return fastest[kind] / fastest[torch.float32]


@check("all-reduce")
def links(device: torch.device) -> Finding:
    """Time all-reduces: us and GB/s (2 (N - 1) / N bytes sent per byte), by size. Collective."""
    count, words = num_ranks(), []
    if count == 1:
        return Verdict.SKIP("one process: nothing is sent")
    for size in REDUCED_BYTES:
        tensor = torch.ones(size // 4, device=device)
        dist.all_reduce(tensor)
        times = []
        for _ in range(5):
            tensor.fill_(1.0)
            torch.get_device_module(device).synchronize(device)
            start = time.perf_counter()
            dist.all_reduce(tensor)
            torch.get_device_module(device).synchronize(device)
            times.append(time.perf_counter() - start)
        is_right = bool(torch.all(tensor == count))
        ranks = gather((statistics.median(times), is_right))
        wrong = [rank for rank, (_, is_right) in enumerate(ranks) if not is_right]
        if wrong:
            return Verdict.FAIL(
                f"{size} bytes of ones do not sum to {count} on rank {listed(wrong)}",
                "the link or its driver corrupts data: see if NCCL_P2P_DISABLE=1 avoids it",
            )
        seconds = max(seconds for seconds, _ in ranks)
        rate = 2 * (count - 1) / count * size / seconds / 1e9
        words.append(f"{size / 1024:,.0f} KiB {seconds * 1e6:,.0f} us ({rate:.2f} GB/s)")
    return Verdict.PASS(f"{count} ranks: {'; '.join(words)}")


@check("loader")
def loader_speed(
    batches: Iterable[Any], step: Callable[[Any], Any], device: torch.device
) -> Finding:
    """Compare the seconds of waiting for a batch with the seconds of its step.

    Args:
        batches: the training loader.
        step: forward and backward of one batch.
        device: synchronised after each step.
    """
    waits, steps = [], []
    start = time.perf_counter()
    for batch in islice(batches, TIMED_BATCHES + 2):
        arrived = time.perf_counter()
        step(batch)
        torch.get_device_module(device).synchronize(device)
        done = time.perf_counter()
        waits.append(arrived - start)
        steps.append(done - arrived)
        start = done
    if len(waits) < 3:
        return Verdict.SKIP(f"{len(waits)} batches are too few to time")
    wait, work = statistics.median(waits[2:]), statistics.median(steps[2:])
    about = f"a batch takes {1000 * wait:.1f} ms to come and {1000 * work:.1f} ms to compute"
    if wait > work:
        return Verdict.WARN(about, "dataloader_num_workers: 2 or more")
    return Verdict.PASS(about)


@check("limits")
def limits(num_workers: int = 0) -> Finding:
    """Check the limits of open files and shared memory on every rank's machine. Collective."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    ranks = gather((files, shared))
    files = min(files for files, _ in ranks)
    free = [shared for _, shared in ranks if shared is not None]
    about = f"{files} open files"
    if free:
        about += f", {min(free) / MIB:,.0f} MiB of shared memory free"
    if files < OPEN_FILES:
        return Verdict.WARN(about, f"ulimit -n {OPEN_FILES}")
    if free and min(free) < SHARED_BYTES and num_workers > 0:
        return Verdict.WARN(about, "a larger /dev/shm (docker run --shm-size 1g) for the workers")
    return Verdict.PASS(about)


@check("clocks")
def clocks() -> Finding:
    """Compare the clocks of the ranks' machines. Collective."""
    if num_ranks() == 1:
        return Verdict.SKIP("one process: one clock")
    spreads = []
    for _ in range(3):
        gather(None)
        times = gather(time.time())
        spreads.append(max(times) - min(times))
    spread = min(spreads)
    if spread > SKEW_SECONDS:
        return Verdict.WARN(
            f"{spread:.1f} s apart", "run chrony or ntpd: logs are compared by time"
        )
    return Verdict.PASS(f"less than {max(spread, 0.001):.3f} s apart")


@check("Hub")
def hub() -> Finding:
    """Report whether the Hub can be reached; no FAIL, as a job that needs it says so itself.
    Collective.
    """
    lost = [number for number, reached in enumerate(gather(hub_reachable())) if not reached]
    if not lost:
        return Verdict.PASS("can be reached")
    return Verdict.SKIP(
        f"rank {listed(lost)} cannot reach it, or has HF_HUB_OFFLINE set: models and data come "
        "from folders, files or its cache"
    )


@check("disk")
def disk(folder: Path, wanted: int) -> Finding:
    """Compare the free bytes of a folder's disk with the bytes a run's checkpoints need."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    about = f"{free / MIB:,.0f} MiB free, {wanted / MIB:,.0f} for the checkpoints"
    if free < wanted:
        return Verdict.FAIL(
            about, "another output_dir, more room, or a smaller save_total_limit (2 at least)"
        )
    return Verdict.PASS(about)

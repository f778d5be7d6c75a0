"""Fault injection into training runs: python tests/faults/campaign.py [--full] [--only NAME ...] [--break PART ...]

Prints one line for each scenario: tried, survived, worst time. The short version runs with the tests; `make faults` runs
the full one. `--break` also disables safeguards of the program, one at a time; a scenario must notice each. The exit code
is 0 if all is as it should be.
"""

import argparse
import contextlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import conftest  # before the libraries: it sets their cache folder
import psutil
import torch
import transformers  # noqa: F401
from ranks import Ranks, import_what_ranks_import

from accel_ft import train
from accel_ft.checkpoint import convert, state, transaction, trust
from accel_ft.checkpoint.open import open_classifier
from accel_ft.errors import CheckpointError, UserError
from accel_ft.runtime.logging import read_events

torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` makes child processes ignore it
logging.getLogger("accel_ft").setLevel(logging.ERROR)

NUM_UPDATES, SAVE_STEPS = 12, 3
LAUNCH_SECONDS = 300.0


class Lost(AssertionError):
    """A scenario that was not survived."""


def check(holds: bool, what: str) -> None:
    """Fail the attempt if a condition does not hold."""
    if not holds:
        raise Lost(what)


def training(words: list[Any], num_ranks: int, log: Path, **kwargs: Any) -> Ranks:
    """Start ranks that train, with the arguments of accel_ft.train."""

    def act() -> None:
        os.environ |= {"ACCELERATE_USE_CPU": "true"} if num_ranks > 1 else {}
        train.main([str(word) for word in words])

    return Ranks(act, num_ranks, log, **kwargs)


class Bench:
    """Where the scenarios work: folder, tiny model, rows, reference runs.

    Attributes:
        folder: everything is below it.
        random: draws the moments; seeded for each scenario.
        patience: factor on the promised times, for a busy or slow machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.random, self.patience = folder, random.Random(0), 1.0
        self.model = conftest.make_tiny_model(folder / "tiny_model")
        self.rows = conftest.write_rows(folder / "train.csv", 47)
        self.eval_rows = conftest.write_rows(folder / "validation.csv", 21, seed=1)
        self.references: dict[Any, tuple[dict[str, object], float]] = {}
        self.count = 0
        self.ranks: Ranks | None = None
        self.log = folder / "nothing launched yet"

    def words(self, run: Path, *more: object) -> list[Any]:
        """Arguments of a job with dropout, shuffling, accumulation and two epochs: 12 updates, a save every 3."""
        words = conftest.job_words(self.model, self.rows, self.eval_rows, run)
        return [*words, "--save_steps", SAVE_STEPS, "--save_total_limit", 2, *more]

    def new_run(self) -> Path:
        """A folder name for a run."""
        self.count += 1
        return self.folder / "runs" / f"run_{self.count:05d}"

    def start(self, run: Path, num_ranks: int, *more: object, **kwargs: Any) -> Ranks:
        """Start the job, or resume it."""
        run.parent.mkdir(exist_ok=True)
        words = self.words(run, "--resume_from_checkpoint", "latest", *more)
        self.ranks = training(words, num_ranks, run.with_suffix(".log"), **kwargs)
        return self.ranks

    def reference(self, num_ranks: int, *more: object) -> tuple[dict[str, object], float]:
        """What an uninterrupted run leaves, and the seconds it takes."""
        key = (num_ranks, *more)
        if key not in self.references:
            for _ in range(1 if self.references else 2):  # the first run tokenises
                run = self.new_run()
                ranks = self.start(run, num_ranks, *more)
                codes = ranks.wait()
                check(codes == [0] * num_ranks, f"reference: {codes}, {tail(run)}")
                import_what_ranks_import()
            self.references[key] = (conftest.run_hash(run), time.monotonic() - ranks.started)
        return self.references[key]

    def resume(self, run: Path, num_ranks: int, *more: object) -> None:
        """Resume to the end; weights, optimizer and every logged value must equal the reference's."""
        for folder in (run / "checkpoints").glob("step_*"):
            transaction.verify(folder)  # no published checkpoint is incomplete
        codes = self.start(run, num_ranks, *more).wait()
        check(codes == [0] * num_ranks, f"resume ended with {codes}: {tail(run)}")
        check(conftest.run_hash(run) == self.reference(num_ranks, *more)[0], "another result")
        check(not list((run / "checkpoints").glob(".s*-*")), "staging folders are left")


def tail(run: Path) -> str:
    """The end of a run's output."""
    log = run.with_suffix(".log")
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def steps_logged(run: Path) -> int:
    """The last update in metrics.jsonl."""
    events = read_events(run / "metrics.jsonl")
    return max((e["step"] for e in events if e["event"] == "train"), default=0)


def check_work_lost(run: Path) -> None:
    """After a kill, the newest checkpoint that a resume can use must be at most one save interval behind the log."""
    saved = [step for step, _ in transaction.list_published(run / "checkpoints")]
    saved += [int(path.name[-8:]) for path in (run / "checkpoints").glob(".sealed-*-step_*")]
    lost = steps_logged(run) - max(saved, default=0)
    check(lost <= SAVE_STEPS, f"{lost} updates lost")


# 1. Kills.


def kill_random(bench: Bench, num_ranks: int) -> None:
    """SIGKILL of all ranks at a random moment of the run."""
    run = bench.new_run()
    seconds = bench.reference(num_ranks)[1]
    ranks = bench.start(run, num_ranks)
    time.sleep(bench.random.uniform(0.0, seconds))
    ranks.kill()
    ranks.wait()
    check_work_lost(run)
    bench.resume(run, num_ranks)
    shutil.rmtree(run)


FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")


def on_each_file_event(run: Path, act: Callable[[int, str], None]) -> None:
    """Call `act` with a number and a description before each file operation below the run's checkpoints."""
    prefix, count = str(run / "checkpoints"), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in FILE_EVENTS and str(args[0]).startswith(prefix):
            count += 1
            act(count, f"{event} {args[0]}")

    fsync = os.fsync

    def audited_fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        hook("open", (os.readlink(f"/proc/self/fd/{number}"),))
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = audited_fsync


def file_events(bench: Bench, num_ranks: int) -> tuple[int, int]:
    """Numbers of the first and last of rank 0's file operations in the third save, which prunes the first checkpoint."""
    run = bench.new_run()
    log = run.with_suffix(".events")

    def before(rank: int) -> None:
        if rank == 0:
            on_each_file_event(run, lambda n, what: os.write(out, f"{n} {what}\n".encode()))

    run.parent.mkdir(exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    bench.start(run, num_ranks, before=before).wait()
    os.close(out)
    lines = log.read_text().splitlines()
    third, fourth = (
        next(i for i, line in enumerate(lines) if f"mkdir {run}/checkpoints/.staging-step_{s:08d}" in line)
        for s in (3 * SAVE_STEPS, 4 * SAVE_STEPS)
    )  # fmt: skip
    return third + 1, fourth


def kill_at(bench: Bench, num_ranks: int, event: int, victim: int | None) -> None:
    """SIGKILL of all ranks, or of one, before rank 0's file operation number `event`."""
    run = bench.new_run()

    def before(rank: int) -> None:
        if rank == 0:
            on_each_file_event(run, act)

    def act(number: int, what: str) -> None:
        if number != event:
            return
        if victim is None:
            os.killpg(0, signal.SIGKILL)
        elif victim == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            beat = json.loads((run / "ranks" / f"rank_{victim:05d}.json").read_text())
            os.kill(beat["pid"], signal.SIGKILL)

    ranks = bench.start(run, num_ranks, "--ddp_timeout", 20, before=before)
    killed = time.monotonic()
    while not ranks.codes:
        ranks.poll()
        killed = time.monotonic()
        time.sleep(0.005)
    codes = ranks.wait()
    seconds = time.monotonic() - killed
    check(-signal.SIGKILL in codes, f"event {event} was not met: {codes}")
    limit = 8.0 * bench.patience  # including 3 s for rank 0's message
    check(seconds < limit, f"the other ranks ended after {seconds:.1f} s")
    check(0 not in codes, f"ended as if nothing had been: {codes}")
    check_work_lost(run)
    bench.resume(run, num_ranks)
    shutil.rmtree(run)


def kills(bench: Bench, tries: int) -> Iterator[Callable[[], None]]:
    """All ranks killed at random moments, and before file operations of a save; 1 and 2 ranks."""
    done = 0
    for num_ranks in (1, 2):
        first, last = file_events(bench, num_ranks)
        events = list(range(first, last + 1))
        if len(events) > tries // 4:
            events = sorted(bench.random.sample(events, tries // 4))
        for event in events:
            done += 1
            yield lambda event=event, n=num_ranks: kill_at(bench, n, event, None)
    for number in range(tries - done):
        yield lambda number=number: kill_random(bench, 1 + number % 2)


def one_rank_killed_in_a_save(bench: Bench, tries: int) -> Iterator[Callable[[], None]]:
    """One of two ranks killed before a file operation of a save: nothing half published, both ranks gone in 8 s."""
    first, last = file_events(bench, 2)
    for number in range(tries):
        event = bench.random.randint(first, last - 8)  # later, rank 1 may rightly be ahead
        yield lambda event=event, number=number: kill_at(bench, 2, event, number % 2)


def killed_20_times(bench: Bench, number: int) -> None:
    """One run killed 20 times, and resumed each time."""
    num_ranks = 1 + number % 2
    run, more = bench.new_run(), ("--num_train_epochs", 11)
    bench.reference(num_ranks, *more)
    for kill in range(1, 21):
        goal = SAVE_STEPS * kill + bench.random.randint(0, 2)
        ranks = bench.start(run, num_ranks, *more)
        while steps_logged(run) < goal:
            check(not ranks.poll(), f"ended too early: {tail(run)}")
            time.sleep(0.002)
        time.sleep(bench.random.uniform(0, 0.03))
        ranks.kill()
        ranks.wait()
        check_work_lost(run)
    bench.resume(run, num_ranks, *more)


# 2. A power cut: data that was not fsynced is lost.


def power_cut(bench: Bench, number: int) -> None:
    """At each rename of a save, files keep only fsynced content; what is published must still verify."""
    num_ranks = 1 + number % 2
    run = bench.new_run()
    disk = run.with_suffix(".disk")
    disk.mkdir(parents=True)

    def before(rank: int) -> None:
        synced: dict[tuple[int, int], tuple[int, int]] = {}
        fsync, rename = os.fsync, Path.rename

        def recording_fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            fsync(number)
            about = os.fstat(number)
            synced[about.st_dev, about.st_ino] = (about.st_size, about.st_mtime_ns)

        def recording_rename(path: Path, target: Any) -> Path:
            if Path(target).name.startswith("step_"):
                shutil.copytree(path, disk / Path(target).name)
                for file in path.rglob("*"):
                    about = file.stat()
                    now = (about.st_size, about.st_mtime_ns)
                    if synced.get((about.st_dev, about.st_ino)) != now and file.is_file():
                        (disk / Path(target).name / file.relative_to(path)).write_bytes(b"")
            return rename(path, target)

        os.fsync, Path.rename = recording_fsync, recording_rename  # type: ignore[method-assign]

    codes = bench.start(run, num_ranks, before=before).wait()
    check(codes == [0] * num_ranks, f"{codes}: {tail(run)}")
    saved = sorted(disk.iterdir())
    check(len(saved) == NUM_UPDATES // SAVE_STEPS, f"{len(saved)} saves seen")
    for folder in saved:
        transaction.verify(folder)


# 3. Damage on the disk.


def checkpoints_of(bench: Bench, strategy: str) -> Path:
    """Checkpoints folder of a short run with a launch configuration: cpu, cpu_ddp or cpu_fsdp2."""
    run = bench.folder / f"saved_{strategy}"
    if not run.exists():
        words = [*bench.words(run), "--max_steps", 6, "--ddp_timeout", 60]
        if strategy == "cpu_fsdp2":
            done = launch(bench, strategy, ["-m", "accel_ft.train", *words])
            check(done.wait(LAUNCH_SECONDS) == 0, log_of(bench))
        else:
            codes = training(words, 1 if strategy == "cpu" else 2, run.with_suffix(".log")).wait()
            check(not any(codes), tail(run))
    return run / "checkpoints"


def damage(bench: Bench, flips: int) -> Iterator[Callable[[], None]]:
    """Every file of a checkpoint of each strategy, cut to 0, 50 and 99 %, removed, or with one bit flipped, at several
    offsets: each time the damage is found, the file is named, and the older checkpoint is taken."""
    for strategy in ("cpu", "cpu_ddp", "cpu_fsdp2"):
        root = bench.new_run()
        shutil.copytree(checkpoints_of(bench, strategy), root)
        older, newer = (folder for _, folder in transaction.list_published(root))
        for file in sorted(path for path in newer.rglob("*") if path.is_file()):
            content = file.read_bytes()
            size = len(content)
            kinds: list[bytes | None] = [content[: size * share // 100] for share in (0, 50, 99)]
            offsets = [bench.random.randrange(size) for _ in range(flips)] if size else []
            for offset in offsets:
                bit = 1 << bench.random.randrange(8)
                kinds.append(
                    content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :]
                )
            for changed in [*(kind for kind in kinds if kind != content), None]:
                yield lambda *a, f=file, c=changed, n=newer, o=older, r=root, was=content: _damaged(
                    f, c, n, o, r, was
                )


def _damaged(
    file: Path, changed: bytes | None, newer: Path, older: Path, root: Path, was: bytes
) -> None:
    file.unlink() if changed is None else file.write_bytes(changed)
    try:
        state.check(newer)
    except CheckpointError as error:
        named = file.name in str(error) or file.name == transaction.MANIFEST
        check(named, f"{error} does not name {file}")
    else:
        raise Lost(f"{file}: damage not found")
    finally:
        try:
            check(state.newest_sound(root) == older, "the older one was not taken")
        finally:
            file.write_bytes(was)


# 4. One rank killed, stopped or failing, under `accelerate launch`.


def launch(bench: Bench, config: str, words: list[Any], **kwargs: Any) -> subprocess.Popen[str]:
    """`accelerate launch` in the background, in float32."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{config}.yaml",
    ]
    command += ["--mixed_precision", "no", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(conftest.ROOT)}
    bench.log = bench.new_run().with_suffix(".launch.log")
    bench.log.parent.mkdir(exist_ok=True)
    with bench.log.open("w") as log:
        return subprocess.Popen(
            command,
            cwd=conftest.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            **kwargs,
        )


def log_of(bench: Bench) -> str:
    """What the last launch printed."""
    return bench.log.read_text(errors="replace")


class Launched:
    """A long job on 2 ranks (or 1) under `accelerate launch`, which has begun to train."""

    def __init__(self, bench: Bench, num_ranks: int, *more: object, script: bool = False) -> None:
        self.bench, self.run = bench, bench.new_run()
        self.run.parent.mkdir(exist_ok=True)
        what = [Path(__file__).parent / "broken.py"] if script else ["-m", "accel_ft.train"]
        words = [*what, *bench.words(self.run, "--num_train_epochs", 300, *more)]
        self.launcher = launch(bench, "cpu" if num_ranks == 1 else "cpu_ddp", words)
        deadline = time.monotonic() + LAUNCH_SECONDS
        while steps_logged(self.run) < SAVE_STEPS:
            check(self.launcher.poll() is None and time.monotonic() < deadline, log_of(bench))
            time.sleep(0.02)
        beats = [json.loads(p.read_text()) for p in sorted((self.run / "ranks").glob("*.json"))]
        self.workers = [psutil.Process(beat["pid"]) for beat in beats]

    def seconds_until_gone(self, limit: float) -> float:
        """Wait until no worker is left, at most `limit` seconds (times the patience); return how long it took."""
        started, limit = time.monotonic(), limit * self.bench.patience
        while any(map(_lives, self.workers)):
            if time.monotonic() - started > limit:
                what = [f"{worker.pid} {worker.status()}" for worker in self.workers]
                self.end()
                raise Lost(f"{what} after {limit} s: {log_of(self.bench)[-3000:]}")
            time.sleep(0.02)
        seconds = time.monotonic() - started
        self.launcher.wait(40)
        return seconds

    def end(self) -> None:
        """Kill the remaining processes."""
        for process in [*self.workers, psutil.Process(self.launcher.pid)]:
            if process.is_running():
                process.kill()
        self.launcher.wait()


def _lives(worker: psutil.Process) -> bool:
    """Whether the process is alive and no zombie; its launcher may reap it during the check."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    return False


def killed_rank(bench: Bench, number: int) -> None:
    """One of two ranks killed while training: the other is gone in 5 s; the message says who, where and how."""
    victim = number % 2
    job = Launched(bench, 2)
    time.sleep(bench.random.uniform(0, 2))
    job.workers[victim].kill()
    job.seconds_until_gone(5.0)
    said = log_of(bench)[-2500:]
    for part in (
        f"rank {victim} (pid {job.workers[victim].pid}",
        "at stage ",
        f"rank_{victim:05d}.log",
        "`-m accel_ft.doctor`",
    ):
        check(part in said, f"{part!r} is not in {said}")
    check("SIGKILL" in said or "exitcode  : -9" in said, said)  # by the launcher; by torch 2.11's
    shutil.rmtree(job.run)


def stopped_rank(bench: Bench, number: int) -> None:
    """One of two ranks stopped (SIGSTOP): both are gone within 10 s after the time limit of 5 s."""
    victim = number % 2
    job = Launched(bench, 2, "--ddp_timeout", 5)
    time.sleep(bench.random.uniform(0, 2))
    job.workers[victim].send_signal(signal.SIGSTOP)
    job.seconds_until_gone(15.0)
    said = log_of(bench)[-2500:]
    check(
        f"rank {victim} (pid {job.workers[victim].pid}" in said and "was stopped for" in said,
        said,
    )
    shutil.rmtree(job.run)


def exception_on_one_rank(bench: Bench, number: int) -> None:
    """An exception on one rank: its message is the last one printed."""
    victim = number % 2
    fault = bench.folder / f"fault_{number}"
    os.environ |= {"BROKEN_RANK": str(victim), "FAULT": str(fault)}
    job = Launched(bench, 2, script=True)
    fault.touch()
    job.seconds_until_gone(30.0)
    last = [line for line in log_of(bench).splitlines() if line.strip(" =-")][-1]
    check(
        "the moon is not made of cheese" in last and f"rank {victim}" in last,
        log_of(bench)[-3000:],
    )
    shutil.rmtree(job.run)


# 5. Signals.


def sigterm(bench: Bench, number: int) -> None:
    """SIGTERM, SIGHUP, SIGINT, SIGUSR1 or SIGUSR2 to launcher or worker at any moment: saved, gone in 10 s, resumed
    identically."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    num_ranks, by_launcher = 1 + number % 2, number // 2 % 2 == 0
    more = ("--num_train_epochs", 12, "--eval_steps", 2)
    expected = bench.reference(num_ranks, *more)[0]
    job = Launched(bench, num_ranks, *more[2:], "--max_steps", 72)
    time.sleep(bench.random.uniform(0, 0.5))
    target = job.launcher if by_launcher else bench.random.choice(job.workers)
    target.send_signal(signals[number % 5])
    job.seconds_until_gone(10.0)
    events = list(read_events(job.run / "metrics.jsonl"))
    if events[-1]["event"] != "end":
        stopped = [event for event in events if event["event"] == "preempted"]
        check(len(stopped) == 1, f"{events[-3:]} {log_of(bench)[-3000:]}")
        newest = transaction.list_published(job.run / "checkpoints")[-1]
        check(newest[0] == stopped[0]["step"], f"saved {newest}, stopped {stopped}")
        state.check(newest[1])
    codes = bench.start(job.run, num_ranks, *more).wait()
    check(codes == [0] * num_ranks, f"{codes}: {tail(job.run)}")
    check(conftest.run_hash(job.run) == expected, "another result")
    shutil.rmtree(job.run)


# 6. Hostile files.


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def payloads(marker: Path) -> list[bytes]:
    """File contents that run code when they are unpickled or read as YAML."""
    zipped = marker.with_suffix(".zip")
    torch.save({"state": Payload(marker)}, zipped)
    plain, old = pickle.dumps(Payload(marker)), pickle.dumps(Payload(marker), protocol=0)
    yaml = f"!!python/object/apply:os.system ['touch {marker}']\n".encode()
    return [plain, old, zipped.read_bytes(), yaml]


def hostile(bench: Bench, tries: int) -> Iterator[Callable[[], None]]:
    """A payload in every file of a checkpoint of each strategy (with a manifest that fits), in values inside its shards,
    in a job's YAML and in a model folder: none runs, and each start ends without a traceback."""
    marker = bench.folder / "executed"
    bench.reference(1)  # its imports make later starts fast
    for strategy, num_ranks in (("cpu_fsdp2", 1), ("cpu", 1), ("cpu_ddp", 2)):
        checkpoint = transaction.list_published(checkpoints_of(bench, strategy))[-1][1]
        names = sorted(
            p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()
        )
        contents = payloads(marker)
        special = ("shard values", "hidden shard values", "metadata of a rank")
        special = special if strategy == "cpu_fsdp2" else ()
        for name in [*names, "custom_checkpoint_0.pkl", *special]:
            if name != transaction.MANIFEST:
                for content in contents[: 1 if name in special else tries]:
                    yield lambda c=checkpoint, n=name, p=content, r=num_ranks: _hostile_checkpoint(
                        bench, c, n, p, r, marker
                    )
    for name in (
        "job.yaml",
        "pytorch_model.bin",
        "config.json",
        "tokenizer_config.json",
        "kernel",
        "index",
        "adapter_config.json",
    ):
        yield lambda name=name: _hostile_model(bench, name, marker)


def _hostile_checkpoint(
    bench: Bench, checkpoint: Path, name: str, content: bytes, num_ranks: int, marker: Path
) -> None:
    run = bench.new_run()
    folder = run / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, folder)
    if "shard values" in name:
        _poison_shard(folder / convert.SHARDED_OPTIMIZER, marker, hidden="hidden" in name)
    elif name == "metadata of a rank":
        for metadata in list(folder.glob("*/.metadata")):
            metadata.unlink()
            (metadata.parent / "__0.metadata").write_bytes(content)
    else:
        (folder / name).write_bytes(content)
    (folder / transaction.MANIFEST).unlink()
    with contextlib.suppress(UserError):  # without a manifest, as a folder from somebody else
        open_classifier(str(folder), torch.device("cpu"))
    _check_nothing_ran(marker)
    files = [p for p in folder.rglob("*") if p.is_file()]
    entries = {p.relative_to(folder).as_posix(): transaction._entry(p) for p in sorted(files)}
    (folder / transaction.MANIFEST).write_text(transaction._manifest(entries))
    more = ("--resume_from_checkpoint", folder, "--max_steps", 6)
    codes = bench.start(run, num_ranks, *more).wait()  # most cannot resume; some files are not read
    said = tail(run)
    check("Traceback" not in said, said)
    check(set(codes) <= {0, 1, 2}, f"{codes} {said}")
    with contextlib.suppress(UserError):
        open_classifier(str(folder), torch.device("cpu"))
    _check_nothing_ran(marker)


def _poison_shard(folder: Path, marker: Path, hidden: bool) -> None:
    """Replace the values inside shards that are not tensors by a payload; hidden: rename the class that marks them so."""
    import io

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
            shard = folder / info.relative_path
            poison = io.BytesIO()
            torch.save(Payload(marker), poison)
            info.offset, info.length = shard.stat().st_size, len(poison.getvalue())
            shard.write_bytes(shard.read_bytes() + poison.getvalue())
    content = pickle.dumps(metadata, protocol=2)
    rename = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\nN}X\x08\0\0\0__name__X\x01\0\0\0Ys\x86b0"
    (folder / ".metadata").write_bytes(content[:2] + rename + content[2:] if hidden else content)


def _hostile_model(bench: Bench, name: str, marker: Path) -> None:
    run = bench.new_run()
    model = run.with_suffix(".model")
    shutil.copytree(bench.model, model)
    job = model / "job.yaml"
    job.write_text("")
    code = f"import os\nos.system('touch {marker}')\n"
    if name == "job.yaml":
        job.write_bytes(payloads(marker)[3])
    elif name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
        (model / name).write_bytes(payloads(marker)[2])
    elif name == "index":
        (model / "model.safetensors").rename(model.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": {"x": "../outside.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "adapter_config.json":  # peft imports the module it names
        adapters = {"peft_type": "LORA", "r": 1, "target_modules": ["query"]}
        adapters |= {"megatron_config": {"x": 1}, "megatron_core": "this", "task_type": "SEQ_CLS"}
        (model / name).write_text(json.dumps(adapters))
        shutil.copy(model / "model.safetensors", model / "adapter_model.safetensors")
    else:
        file = model / ("config.json" if name == "kernel" else name)
        values = json.loads(file.read_text())
        (model / "mine.py").write_text(code)
        auto = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification"), "mine.Mine")
        values |= {"config.json": {"auto_map": auto, "model_type": "mine"}, "kernel": {"attn_implementation": "some/kernel"},
                   "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"}}[name]  # fmt: skip
        file.write_text(json.dumps(values))
    words = bench.words(run, "--model_name_or_path", model, "--max_steps", 1, "--config", job)
    ranks = training(words, 1, run.with_suffix(".log"))
    codes = ranks.wait()
    said = tail(run)
    if name != "tokenizer_config.json":  # transformers uses its own tokenizer for this model
        check(codes == [2] and "error: " in said, f"{codes} {said}")
    check("Traceback" not in said, said)
    _check_nothing_ran(marker)


def _check_nothing_ran(marker: Path) -> None:
    executed = marker.exists()
    marker.unlink(missing_ok=True)
    check(not executed, "the payload was executed")


# 7. The disk.


def disk(bench: Bench, tries: int) -> Iterator[Callable[[], None]]:
    """A small tmpfs: full, read-only or gone during a run, or too small from the start: all ranks end, with
    at most one error message each. If full or read-only: the last checkpoint is intact, no staging folder is left, and
    the run later resumes identically."""
    for number in range(tries):
        for kind, ranks in (("full", 0), ("read-only", 1), ("vanished", 1), ("too small", 0)):
            yield lambda kind=kind, n=number + ranks: _on_small_disk(bench, kind, 1 + n % 2)


def _on_small_disk(bench: Bench, kind: str, num_ranks: int) -> None:
    mount = bench.folder / "disk"
    mount.mkdir(exist_ok=True)
    log = bench.new_run().with_suffix(".log")
    size = "400k" if kind == "too small" else "16m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], check=True)
    try:
        run = mount / "run"
        log.parent.mkdir(exist_ok=True)
        words = bench.words(run, "--resume_from_checkpoint", "latest")
        goal = bench.random.randint(SAVE_STEPS, 2 * SAVE_STEPS)
        done = log.with_suffix(".done")

        def waiting(rank: int) -> None:
            from accel_ft.engine import run as engine

            after_update = engine.Run.after_update

            def after(self: Any) -> None:
                after_update(self)
                while kind != "too small" and self.step == goal and not done.exists():
                    time.sleep(0.01)

            engine.Run.after_update = after  # type: ignore[method-assign]

        ranks = training(words, num_ranks, log, before=waiting)
        checkpoints = run / "checkpoints"
        while kind != "too small" and (
            steps_logged(run) < goal or not transaction.list_published(checkpoints)
        ):
            check(not ranks.poll(), "ended too early")
            time.sleep(0.002)
        if kind == "full":
            with (mount / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
        elif kind == "read-only":  # mounted on top: below, a log is open for writing
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", run / "checkpoints"], check=True
            )
        elif kind == "vanished":
            shutil.rmtree(run, ignore_errors=True)
        done.touch()
        codes = ranks.wait(40 * bench.patience)
        said = log.read_text()
        check(all(codes), f"{codes} {said}")
        told = [line for line in said.splitlines() if line.startswith("error: ")]
        check("Traceback" not in said and 1 <= len(told) <= num_ranks, said)
        check(any(code == 2 for code in codes), f"{codes} {said}")
        if kind in ("full", "read-only"):
            if kind == "read-only":
                subprocess.run(["umount", run / "checkpoints"], check=True)
            check(not list((run / "checkpoints").glob(".staging*")), "a staging folder is left")
            state.check(transaction.list_published(run / "checkpoints")[-1][1])
            (mount / "filling").unlink(missing_ok=True)
            codes = training(words, num_ranks, log).wait()
            check(codes == [0] * num_ranks, log.read_text())
            check(conftest.run_hash(run) == bench.reference(num_ranks)[0], "another result")
        elif kind == "too small":
            check("are free on its disk" in said, said)
    finally:
        log.with_suffix(".done").touch()
        subprocess.run(["umount", "-l", mount], check=True)


# Safeguards disabled.


PARTS = {  # the scenario that must notice, and its message
    "fsync": ("power_cut", "is no checkpoint, or a damaged one"),
    "rename": ("kills", "is no checkpoint, or a damaged one"),
    "manifest": ("damage", "the older one was not taken"),
    "rng": ("kills", "another result"),
    "trust": ("hostile", "the payload was executed"),
}


@contextlib.contextmanager
def taken_out(part: str) -> Iterator[None]:
    """Disable a safeguard inside the context."""
    modules = (transaction, trust, convert)
    whole = [dict(vars(module)) for module in modules]
    take_out(part)
    try:
        yield
    finally:
        for module, names in zip(modules, whole, strict=True):
            vars(module).update(names)


def take_out(part: str) -> None:
    """Disable a safeguard."""
    if part == "fsync":
        transaction.fsync = lambda path: None
    elif part == "rename":

        def start(final: Path) -> Path:
            shutil.rmtree(final, ignore_errors=True)
            final.mkdir()
            return final

        publish = transaction.publish

        def publish_in_place(final: Path, with_manifest: bool = True) -> None:
            copy = transaction.staging_folder.original(final)  # type: ignore[attr-defined]
            shutil.copytree(final, copy)
            shutil.rmtree(final)
            transaction.staging_folder, place = (
                transaction.staging_folder.original,
                transaction.staging_folder,
            )  # type: ignore[attr-defined]
            publish(final, with_manifest)
            transaction.staging_folder = place

        def in_place(final: Path) -> Path:
            return final

        in_place.original = transaction.staging_folder  # type: ignore[attr-defined]
        transaction.seal = lambda final: None
        transaction.start, transaction.publish, transaction.staging_folder = (
            start,
            publish_in_place,
            in_place,
        )
    elif part == "manifest":
        transaction.verify = lambda folder: None
    elif part == "trust":
        trust.refuse_code = lambda folder: None
    else:
        load_any = convert.load_any

        def without_rng(accelerator: Any, folder: Path) -> None:
            kept = torch.get_rng_state()
            load_any(accelerator, folder)
            torch.set_rng_state(kept)

        convert.load_any = without_rng


Scenario = Callable[[Bench, int], Iterator[Callable[[], None]]]


def repeated(attempt: Callable[[Bench, int], None]) -> Scenario:
    """A scenario that repeats one attempt; the attempt's number selects ranks and signals."""
    return lambda bench, tries: (partial(attempt, bench, number) for number in range(tries))


SCENARIOS: dict[str, tuple[Scenario, int, int]] = {
    # name: (attempts, how many in the short version, how many in the full one)
    "kills": (kills, 16, 500),
    "one_rank_killed_in_a_save": (one_rank_killed_in_a_save, 2, 40),
    "killed_20_times": (repeated(killed_20_times), 1, 4),
    "power_cut": (repeated(power_cut), 2, 4),
    "damage": (damage, 3, 50),
    "killed_rank": (repeated(killed_rank), 1, 10),
    "stopped_rank": (repeated(stopped_rank), 1, 10),
    "exception_on_one_rank": (repeated(exception_on_one_rank), 1, 10),
    "sigterm": (repeated(sigterm), 2, 40),
    "hostile": (hostile, 1, 4),
    "disk": (disk, 1, 4),
}


def run_scenario(
    bench: Bench, name: str, options: argparse.Namespace, stop: bool
) -> dict[str, Any]:
    """Count attempts and survivals; return these, the longest attempt's seconds, and the faults."""
    bench.random = random.Random(f"{options.seed} {name}")
    scenario, short, whole = SCENARIOS[name]
    tried, worst, faults = 0, 0.0, []
    for attempt in scenario(bench, whole if options.full else short):
        started = time.monotonic()
        tried += 1
        try:
            attempt()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
            if bench.ranks is not None:
                bench.ranks.kill()
        worst = max(worst, time.monotonic() - started)
        if faults and stop:
            break
    return {
        "tried": tried,
        "survived": tried - len(faults),
        "worst_seconds": round(worst, 1),
        "faults": faults,
    }


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--break", dest="broken", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits in seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    todo = [(name, name, None) for name in options.only]
    todo += [(f"without {part}", PARTS[part][0], part) for part in options.broken]
    results = {}
    print(f"{'scenario':28} {'tried':>6} {'survived':>9} {'worst seconds':>14}")
    with tempfile.TemporaryDirectory(
        prefix="accel_ft-faults-", ignore_cleanup_errors=True
    ) as folder:
        bench = Bench(Path(folder))
        bench.patience = options.patience
        for num_ranks in (1, 2) if options.broken else ():
            bench.reference(num_ranks)  # with every safeguard
        for title, name, part in todo:
            with taken_out(part) if part else contextlib.nullcontext():
                result = run_scenario(bench, name, options, stop=part is not None)
            faults = result["faults"]
            noticed = part is not None and any(PARTS[part][1] in fault for fault in faults)
            result["as_it_should"] = noticed if part else not faults
            results[title] = result
            print(
                f"{title:28} {result['tried']:6} {result['survived']:9} {result['worst_seconds']:14}",
                flush=True,
            )
            for fault in faults[:3]:
                print(f"    {fault}", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results))
    sys.exit(any(not result["as_it_should"] for result in results.values()))


if __name__ == "__main__":
    main()

"""Two hosts made by the test: network namespaces joined by a virtual cable, with one `accelerate launch` on each."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, events_of, job_words

from accel_ft import train

# Namespace names are shared by all runs on a machine, hence the pid; addresses are private to each pair.
HOSTS = {f"accel_ft_{os.getpid()}_{number}": f"10.77.0.{number + 1}" for number in range(2)}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Make the namespaces; skip if that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    try:
        try:
            join_hosts()
        except (subprocess.CalledProcessError, PermissionError) as error:
            pytest.skip(f"may not make network namespaces: {getattr(error, 'stderr', error)}")
        yield
    finally:  # even if only some were made
        for host in HOSTS:
            subprocess.run(
                ["ip", "netns", "del", host], capture_output=True, timeout=20, check=False
            )


def join_hosts() -> None:
    for host in HOSTS:
        ip("netns", "add", host)
    first, second = HOSTS
    ip(*f"link add aft0 netns {first} type veth peer name aft1 netns {second}".split())
    for number, (host, address) in enumerate(HOSTS.items()):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", f"aft{number}")
        ip("-n", host, "link", "set", f"aft{number}", "up")
        ip("-n", host, "link", "set", "lo", "up")


def on_the_cpu(name: str, folder: Path) -> Path:
    """A shipped multi-node YAML, changed only for the CPU and the number of ranks."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / name).read_text())
    settings |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    settings.pop("gpu_ids")
    path = folder / name
    path.write_text(yaml.safe_dump(settings))
    return path


def train_on_both(config: Path, words: list[str], *on_second: str) -> tuple[list[int], list[str]]:
    """Launch on each host, with extra arguments on the second; return exit codes and error outputs."""
    processes = []
    for rank, host in enumerate(HOSTS):
        command = [
            "ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", str(config), "--machine_rank", str(rank), "--main_process_ip", next(iter(HOSTS.values())),
            "-m", "accel_ft.train", *words, *on_second * rank,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": f"aft{rank}"}
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize("name", ["multi_node_ddp.yaml", "multi_node_fsdp2.yaml"])
def test_two_hosts_train_the_curve_of_one_process(
    hosts, tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path, name: str
) -> None:
    words = job_words(still_model, rows_file, odd_file, tmp_path / "two_hosts")
    words += ["--save_steps", "12"]
    codes, errors = train_on_both(on_the_cpu(name, tmp_path), words)
    assert codes == [0, 0], "\n".join(errors)[-6000:]
    train.main(job_words(still_model, rows_file, odd_file, tmp_path / "one_process"))
    two, one = (
        [(e["loss"], e["grad_norm"]) for e in events_of(tmp_path / run) if e["event"] == "train"]
        for run in ("two_hosts", "one_process")
    )
    assert len(two) == 12
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_hosts_with_other_jobs(
    hosts, tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """Each host has its own command line; if they differed, replicas would diverge or wait for each other."""
    words = job_words(still_model, rows_file, odd_file, tmp_path / "run")
    config = on_the_cpu("multi_node_ddp.yaml", tmp_path)
    codes, errors = train_on_both(config, words, "--learning_rate", "3e-3", "--eval_steps", "2")
    assert 0 not in codes
    for said in errors:
        assert "error: the ranks were started for different jobs. Fix: the same command" in said
        assert "eval_steps: None on rank 0, 2 on rank 1" in said
        assert "learning_rate: 0.001 on rank 0, 0.003 on rank 1" in said
    assert not (tmp_path / "run/checkpoints").exists()
    others = tmp_path / "others.csv"  # as many rows, as long
    others.write_text(odd_file.read_text().replace("goal", "coach"))
    codes, errors = train_on_both(config, [*words, "--test_file", odd_file], "--test_file", others)
    assert 0 not in codes
    for said in errors:
        assert (
            "error: rank 1 reads other test rows than rank 0, or has another tokenizer. Fix: "
            in said
        )


FOLDER_OF_EACH = """
import os, sys
from pathlib import Path
from torch import distributed as dist
from accel_ft.errors import ConfigError
from accel_ft.runtime import watch

watch.SHARED_SECONDS = 1.0
root, name = Path(sys.argv[1]), sys.argv[2]
rank = int(os.fork() == 0)
if name.startswith("full"):  # a disk: that is told where it matters
    watch.Watch._write_beat = lambda self: setattr(self, "_can_write", False)
dist.init_process_group("gloo", f"file://{root}/store_{name}", world_size=2, rank=rank)
try:
    watch.Watch(root / name.format(rank) / "ranks", rank, 2, 60)
except ConfigError as error:
    print(error, flush=True)
rank or os.wait()
os._exit(0)  # gloo's threads may abort a process at Python's end
"""


@pytest.mark.parametrize("name", ["of_{}", "of_both", "full_{}"])
def test_a_folder_that_hosts_do_not_share(tmp_path: Path, name: str) -> None:
    """Each would keep its part of a checkpoint, and nobody could read it."""
    command = [sys.executable, "-c", FOLDER_OF_EACH, str(tmp_path), name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    first, second = (f"({socket.gethostname()}, {tmp_path / name.format(rank)})" for rank in (0, 1))
    line = f"output_dir: rank 1 {second} cannot see what rank 0 {first} writes. Fix: the same"
    assert done.stdout.count(line) == (2 if name == "of_{}" else 0), done.stderr
    assert done.stdout.count("Fix") == done.stdout.count(line)

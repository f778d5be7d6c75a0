"""Two hosts of the test's own: network namespaces joined by a virtual cable, one `accelerate launch` on each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, events_of, job_words

from accel_ft import train

HOSTS = {"accel_ft_0": "10.77.0.1", "accel_ft_1": "10.77.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Make the namespaces; skip where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    try:
        for host in HOSTS:
            subprocess.run(
                ["ip", "netns", "del", host], capture_output=True, timeout=20, check=False
            )
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            "aft0",
            "netns",
            "accel_ft_0",
            "type",
            "veth",
            "peer",
            "name",
            "aft1",
            "netns",
            "accel_ft_1",
        )
        for number, (host, address) in enumerate(HOSTS.items()):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", f"aft{number}")
            ip("-n", host, "link", "set", f"aft{number}", "up")
            ip("-n", host, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, PermissionError) as error:
        pytest.skip(f"may not make network namespaces: {getattr(error, 'stderr', error)}")
    yield
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=20, check=False)


def on_the_cpu(name: str, folder: Path) -> Path:
    """A shipped multi-node YAML, changed only in what the CPU and the number of ranks ask for."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / name).read_text())
    settings |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    settings.pop("gpu_ids")
    path = folder / name
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("name", ["multi_node_ddp.yaml", "multi_node_fsdp2.yaml"])
def test_two_hosts_train_the_curve_of_one_process(
    hosts, tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path, name: str
) -> None:
    output_dir = tmp_path / "two_hosts"
    config = on_the_cpu(name, tmp_path)
    processes = []
    for rank, host in enumerate(HOSTS):
        command = [
            "ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", str(config), "--machine_rank", str(rank), "--main_process_ip", HOSTS["accel_ft_0"],
            "-m", "accel_ft.train", *job_words(still_model, rows_file, odd_file, output_dir),
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
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-6000:]
    train.main(job_words(still_model, rows_file, odd_file, tmp_path / "one_process"))
    two, one = (
        [(e["loss"], e["grad_norm"]) for e in events_of(tmp_path / run) if e["event"] == "train"]
        for run in ("two_hosts", "one_process")
    )
    assert len(two) == 12
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)

"""The short version of the campaign, and that it notices what is taken out of the program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent / "campaign.py"
SCENARIOS = (
    "kills", "one_rank_killed_in_a_save", "killed_20_times", "power_cut", "damage", "killed_rank", "stopped_rank",
    "exception_on_one_rank", "sigterm", "hostile", "disk",
)  # fmt: skip


def run_campaign(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "HF_HOME"}
    command = [sys.executable, str(CAMPAIGN), *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_survived(tmp_path: Path, name: str) -> None:
    if name == "disk" and not _can_mount(tmp_path):
        pytest.skip("mounting a small disk needs root")
    done = run_campaign("--only", name, "--json", str(tmp_path / "result.json"), seconds=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result = json.loads((tmp_path / "result.json").read_text())[name]
    assert result["tried"] == result["survived"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("part", "scenario"),
    [("fsync", "power_cut"), ("rename", "kills"), ("manifest", "damage"), ("rng", "kills"), ("trust", "hostile")],
)  # fmt: skip
def test_what_is_taken_out_is_noticed(part: str, scenario: str) -> None:
    done = run_campaign("--break", part, "--only", scenario, "--stop", seconds=880)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-6000:]


def _can_mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    return subprocess.run(["umount", str(folder)], check=False).returncode == 0

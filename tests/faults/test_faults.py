"""The short version of the fault-injection campaign (campaign.py)."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parent / "campaign.py"
pytestmark = pytest.mark.timeout(1800)
SCENARIOS = (
    "kills", "one_rank_killed_in_a_save", "killed_20_times", "power_cut", "damage", "killed_rank", "stopped_rank",
    "exception_on_one_rank", "sigterm", "hostile", "disk",
)  # fmt: skip


PARTS = ("fsync", "rename", "manifest", "rng", "trust")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the short campaign, by scenario and by disabled safeguard."""
    folder = tmp_path_factory.mktemp("campaign")
    names = [name for name in SCENARIOS if name != "disk" or _can_mount(folder)]
    file = folder / "result.json"
    command = [sys.executable, str(CAMPAIGN), "--patience", "2", "--json", str(file)]
    environment = {key: value for key, value in os.environ.items() if key != "HF_HOME"}
    with (folder / "said").open("w") as said, contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, "--only", *names, "--break", *PARTS],
            env=environment, stdout=said, stderr=said, timeout=1780, check=False,
        )  # fmt: skip
    assert file.exists(), (folder / "said").read_text()[-8000:]
    counted: dict[str, dict[str, Any]] = json.loads(file.read_text())
    if len(counted) == len(names) + len(PARTS):
        all_are = all(each["as_it_should"] for each in counted.values())
        assert all_are == (done.returncode == 0)
    return counted


@pytest.mark.parametrize("name", SCENARIOS)
def test_survived(results: dict[str, dict[str, Any]], tmp_path: Path, name: str) -> None:
    if name == "disk" and not _can_mount(tmp_path):
        pytest.skip("mounting a small disk needs root")
    assert name in results, f"the campaign ended before it: {results}"
    assert results[name]["faults"] == []
    assert results[name]["tried"] == results[name]["survived"] > 0


@pytest.mark.parametrize("part", PARTS)
def test_what_is_taken_out_is_noticed(results: dict[str, dict[str, Any]], part: str) -> None:
    title = f"without {part}"
    assert title in results, f"the campaign ended before it: {results}"
    assert results[title]["as_it_should"], results[title]


def _can_mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    return subprocess.run(["umount", str(folder)], check=False).returncode == 0

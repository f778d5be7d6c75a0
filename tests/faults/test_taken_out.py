"""The campaign notices what is taken out of the program."""

import pytest
from test_faults import run_campaign


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("part", "scenario"),
    [("fsync", "power_cut"), ("rename", "kills"), ("manifest", "damage"), ("rng", "kills"), ("trust", "hostile")],
)  # fmt: skip
def test_what_is_taken_out_is_noticed(part: str, scenario: str) -> None:
    done = run_campaign("--break", part, "--only", scenario, "--stop", seconds=880)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-6000:]

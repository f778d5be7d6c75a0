"""On 2 ranks the doctor names what is wrong with broken programs, and the fixes it offers work."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import launch, run, untimed_verdicts

from accel_ft.diagnosis.postmortem import post_mortem


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Findings by broken program; one launch runs them all."""
    out = tmp_path_factory.mktemp("sick") / "found.json"
    script = Path(__file__).with_name("sick.py")
    run(
        "python",
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        2,
        "--standalone",
        script,
        out,
    )
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return results


NAMED = {
    "same_data": ("training rows", "the ranks read the same rows: 20 on more than one"),
    "no_set_epoch": ("training rows", "both epochs have the same order"),
    "epoch_of_one_rank": ("training rows", "in the second epoch the ranks read the same rows"),
    "uneven_loaders": ("training rows", "batches of each rank 5, 4; rows of each rank 10, 8"),
    "padded_evaluation": ("evaluation rows", "20 predictions are counted of 19 rows"),
    "seeds": ("same weights", "4 of 4 differ from rank 0's, on rank 1; the first is 0.weight"),
    "drifting_buffer": ("same buffers", "2 of 3 differ from rank 0's, on rank 1; the first is 1.running_mean"),
    "tampered": ("same gradients", "1 of 4 differ from rank 0's, on rank 1; the first is module.0.weight"),
    "skipped_backward": ("same weights", "on rank 1; the first is module.0.weight"),
    "probe": ("same loss", "for the same batch the ranks compute"),
    "late_rank": ("arrival at wrap", "rank 1 comes last"),
    "synchronised_too_often": ("accumulation", "summed over the ranks up to 4 times an update of 4 micro-batches"),
    "unsummed": ("accumulation", "2 updates step on gradients not summed over the ranks"),
    "fresh_state": ("resume: model", "values differ on rank 0, 1"),
    "means_of_means": ("one against many", "update 1: loss"),
}  # fmt: skip


@pytest.mark.parametrize("program", NAMED)
def test_the_broken_program_is_named_and_the_mend_works(
    found: dict[str, Any], program: str
) -> None:
    check, words = NAMED[program]
    broken = found[program].pop("broken")
    assert (broken["check"], words in broken["measured"]) == (check, True), broken
    assert broken["verdict"] in ("FAIL", "WARN")
    assert broken["mend"]
    others = {
        name: value["verdict"] for name, value in found[program].items() if name != "a rank too few"
    }
    assert others
    assert set(others.values()) == {"PASS"}, found[program]


def test_healthy_programs_pass(found: dict[str, Any]) -> None:
    cases = found["healthy"]
    assert cases.pop("reduces") == [1, 1]
    assert cases.pop("adversarial") == {"unsummed": 0, "reduce": 3}
    assert cases.pop("summed by hand") == {"unsummed": 0}
    assert cases.pop("sharded")["verdict"] == "SKIP"
    assert cases["gathered"]["measured"].startswith(
        "all ranks count the same; rows of each rank 19"
    )
    assert {finding["verdict"] for finding in cases.values()} == {"PASS"}, cases


def test_rows_never_read(found: dict[str, Any]) -> None:
    assert "rows are never read" in found["same_data"]["a rank too few"]["measured"]


def test_gradient_strides(found: dict[str, Any]) -> None:
    """Either fix removes PyTorch's warning; the hook that is commonly recommended does not."""
    cases = found["strided"]
    assert cases["warned"] == [True, True, False, False]
    assert cases["broken"]["verdict"] == "FAIL"
    for part in ("0.weight [64, 1, 3, 3]", "(9, 1, 3, 1)", "(9, 9, 3, 1)"):
        assert part in cases["broken"]["measured"]
    assert cases["hook that does nothing"]["verdict"] == "FAIL"
    assert cases["channels_last"]["verdict"] == cases["match_strides"]["verdict"] == "PASS"


@pytest.mark.parametrize("config", ["cpu_ddp.yaml", "cpu_fsdp2.yaml"])
def test_healthy_ranks(tmp_path: Path, config: str) -> None:
    file = tmp_path / "found.json"
    words = ["-m", "accel_ft.doctor", "--output_dir", tmp_path / "runs" / "x", "--json", file]
    done = launch(config, "--mixed_precision", "no", *words)
    findings = json.loads(file.read_text())
    assert untimed_verdicts(findings) == {"PASS", "SKIP"}, done.stdout
    skipped = {finding["check"] for finding in findings if finding["verdict"] == "SKIP"}
    assert skipped - {"Hub"} == ({"same weights"} if "fsdp" in config else set())


# Crashes and hangs: ranks that end without a message.

ENDS = {
    "nothing": "2 ranks reached their end",
    "segmentation fault": "rank 1 at stage model at File",
    "hidden exit": "rank 1 at stage model: ended without a message with exit code 0",
    "exception": "rank 1 at stage model at File",
    "swallowed exception": "ended well before: rank 1 after stage step 3",
    "out of data early": "ended well before: rank 1 after stage step 2",
    "different collectives": "a hang: rank 0 at stage step 2",
    "state dict on rank 0 alone": "a hang: rank 0 at stage step 2",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files left by these programs, all started at once."""
    folder = tmp_path_factory.mktemp("ends")
    run("python", Path(__file__).with_name("ends.py"), folder, *ENDS)
    return folder


@pytest.mark.parametrize("fault", ENDS)
def test_who_ended_where(ends: Path, fault: str) -> None:
    codes = {
        int(rank): code
        for rank, code in json.loads((ends / "codes.json").read_text())[fault].items()
    }
    finding = post_mortem(ends / fault, 2, codes)
    assert ENDS[fault] in finding.measured, (finding, codes)
    assert (finding.verdict == "PASS") == (fault == "nothing")
    first, _, others = finding.measured.partition(", rank ")
    if "rank 1 at" in ENDS[fault]:  # rank 0 only sees its connection break
        assert first.startswith("rank 1 at")
        assert "Connection" in others
    if fault == "exception":
        assert "in build_model: ValueError: no such layer" in first
    if fault == "segmentation fault":
        assert "in build_model" in first
        assert signal.Signals(-codes[1]).name == "SIGSEGV"
        assert first.endswith("ended by SIGSEGV")
    if "a hang" in ENDS[fault]:
        assert all("at stage step 2 at File" in words for words in (first, others))
        assert all("in train: " in words for words in (first, others))
        assert "in train: Timeout (" in finding.measured  # the other may lose its connection
        assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in finding.mend

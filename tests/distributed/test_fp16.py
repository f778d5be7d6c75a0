"""fp16 with a real loss scaler under every strategy, on gloo: worker.py enables on the CPU what accelerate disables."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LATEST, cut_off, events_of, job_words
from test_strategies import on

FP16 = ("single", "ddp2", "fsdp2", "fsdp1")
ONCE = ["--save_steps", "12"]
CLIPPED = ["--max_grad_norm", "0.3"]  # between the smallest and the largest norm
BEST = ["--load_best_model_at_end", "true", "--eval_steps", "3", "--save_steps", "3"]
SCALER = {
    "init_scale": 2.0**24,
    "growth_interval": 2,
}  # the first updates overflow, later ones now and then
OVERFLOWN, STEPPED = 3, 9  # update 3 overflows; of the first 9 some step


@pytest.fixture(scope="module")
def files(still_model: Path, rows_file: Path, odd_file: Path) -> tuple[Path, Path, Path]:
    return still_model, rows_file, odd_file


@pytest.fixture(scope="module")
def float32(
    tmp_path_factory: pytest.TempPathFactory, files: tuple[Path, Path, Path]
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("float32")
    words = [*job_words(*files, folder / "run"), *CLIPPED, "--save_steps", "2"]
    return folder / "run", on("single", folder, {"do": "curve", "words": words})[0]


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, files: tuple[Path, Path, Path]
) -> dict[str, Any]:
    """By strategy: folder; results of the clipped run, of the one that overflows, and of two with a NaN loss."""
    runs = {}
    for strategy in FP16:
        folder = tmp_path_factory.mktemp(strategy)
        tasks: list[dict[str, Any]] = [
            {"do": "scaled", "words": [*job_words(*files, folder / "clipped"), *CLIPPED, *ONCE]},
            {
                "do": "scaled",
                "words": [*job_words(*files, folder / "run"), *BEST],
                "scaler": SCALER,
            },
        ]
        for policy in ("skip", "rollback"):
            words = [*job_words(*files, folder / policy), "--on_nonfinite", policy]
            tasks.append({"do": "sick_curve", "words": [*words, "--save_steps", "3"]})
        runs[strategy] = (folder, *on(strategy, folder, *tasks, precision="fp16"))
    return runs


@pytest.mark.parametrize("strategy", FP16)
def test_the_curve_of_float32(
    whole: dict[str, Any], float32: tuple[Path, Any], strategy: str
) -> None:
    """Gradients are unscaled before their norm is taken and they are clipped."""
    _, (_, curve), *_ = whole[strategy]
    assert min(norm for _, norm in curve) < 0.3 < max(norm for _, norm in curve)
    for (loss, norm), (exact_loss, exact_norm) in zip(curve, float32[1], strict=True):
        assert loss == pytest.approx(exact_loss, rel=1e-3)
        assert norm == pytest.approx(exact_norm, rel=1e-2)


@pytest.mark.parametrize("strategy", FP16)
def test_an_overflow_halves_the_scale_and_leaves_the_rest(
    whole: dict[str, Any], strategy: str
) -> None:
    """On all ranks: no step, the same weights, one event. Two finite updates in a row double the scale."""
    folder, _, (updates, curve), *_ = whole[strategy]
    scales = [[scale for scale, *_ in ranks] for ranks in updates]
    assert all(scale == ranks[0] for ranks in scales for scale in ranks)
    before = [[SCALER["init_scale"], 0.0, digest] for *_, digest in updates[0]]
    steps, sound, told = 0, 0, []
    for ranks, (loss, norm) in zip(updates, curve, strict=True):
        assert loss == pytest.approx(1.39, abs=0.02)
        overflown = ranks[0][0] < before[0][0]
        assert (norm is None) == overflown
        steps += not overflown
        told += [(len(told) + steps + 1, before[0][0])] * overflown
        sound = 0 if overflown else sound + 1
        grown = sound == SCALER["growth_interval"]
        sound *= not grown
        for (scale, count, digest), (old_scale, _, old_digest) in zip(ranks, before, strict=True):
            assert scale == old_scale * (0.5 if overflown else 2.0 if grown else 1.0)
            assert (count, digest == old_digest) == (steps, overflown)
        before = ranks
    assert 0 < steps < len(updates)
    assert updates[0][0][1] == 0.0
    events = [each for each in events_of(folder / "run") if each["event"] == "overflow"]
    assert [(each["step"], each["loss_scale"]) for each in events] == told


@pytest.mark.parametrize("strategy", FP16)
def test_a_sick_loss_is_no_overflow(whole: dict[str, Any], strategy: str) -> None:
    folder, _, _, *sick = whole[strategy]
    update = 3 if strategy == "single" else 5  # that of the fifth micro-batch
    for policy, curve in zip(("skip", "rollback"), sick, strict=True):
        assert [loss is None for loss, _ in curve] == [n == update for n in range(1, 13)]
        assert not [e for e in events_of(folder / policy) if e["event"] == "overflow"]
        (event,) = [e for e in events_of(folder / policy) if e["event"] == "nonfinite"]
        assert (event["update"], event["policy"], event["losses"]) == (update, policy, ["nan"])


@pytest.mark.parametrize("strategy", FP16)
def test_a_resume_carries_the_scale(
    whole: dict[str, Any],
    float32: tuple[Path, Any],
    files: tuple[Path, Path, Path],
    strategy: str,
    tmp_path: Path,
) -> None:
    """After an overflow and after a step, bit for bit; from another strategy; from a float32 run, with a new scale."""
    folder, _, (updates, curve), *_ = whole[strategy]
    assert curve[OVERFLOWN - 1][1] is None
    assert any(norm is not None for _, norm in curve[:STEPPED])
    tasks = []
    for step in (OVERFLOWN, STEPPED):
        shutil.copytree(folder / "run", tmp_path / str(step))
        cut_off(tmp_path / str(step), step)
        words = [*job_words(*files, tmp_path / str(step)), *BEST, *LATEST]
        tasks.append({"do": "scaled", "words": words})
    other = whole["fsdp2" if strategy != "fsdp2" else "ddp2"]
    of_float32 = [*CLIPPED, *ONCE, "--allow_changed", "mixed_precision"]
    for source, step, keys in ((other[0] / "run", STEPPED, ONCE), (float32[0], 2, of_float32)):
        words = [*job_words(*files, tmp_path / f"from_{step}"), *keys, "--resume_from_checkpoint"]
        place = source / f"checkpoints/step_{step:08d}"
        tasks.append({"do": "scaled", "words": [*words, str(place)]})
    *again, (theirs, _), (anew, near) = on(strategy, tmp_path, *tasks, precision="fp16")
    last = "checkpoints/step_00000012/scaler.pt"
    for step, (rest, all_of_it) in zip((OVERFLOWN, STEPPED), again, strict=True):
        assert (rest, all_of_it) == (updates[step:], curve)
        scales = [torch.load(run / last) for run in (tmp_path / str(step), folder / "run")]
        assert scales[0] == scales[1]
        models = [run / "model/model.safetensors" for run in (tmp_path / str(step), folder / "run")]
        assert models[0].read_bytes() == models[1].read_bytes()
    saved = other[2][0][STEPPED - 1][0][0]
    assert theirs[0][0][0] in (saved / 2, saved, saved * 2)
    assert anew[0][0][0] == 2.0**16
    for (loss, _), (exact_loss, _) in zip(near, float32[1][2:], strict=True):
        assert loss == pytest.approx(exact_loss, rel=1e-3)

"""No silent fallback: what a YAML asks for runs, or the run stops and says why. Every shipped YAML is tried."""

from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, job_words, launch, run

# The multi-node ones are tried on two hosts of the test's own: test_two_hosts.py.
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_line_is_its_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# accelerate launch --config_file accelerate_configs/{path.name} ")
    job = Path(first.split("--config ")[1])
    assert (ROOT / job).is_file()


def refused(config: str | Path, words: list[str], *options: object) -> str:
    done = launch(str(config), *options, "-m", "accel_ft.train", *words, check=False, seconds=120)
    assert done.returncode != 0
    assert "update" not in done.stdout
    return done.stderr


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path) -> list[str]:
    return job_words(tiny_model, rows_file, odd_file, tmp_path / "run")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
@pytest.mark.parametrize(
    "name", ["gpu.yaml", "ddp.yaml", "fsdp1.yaml", "fsdp2.yaml", "fsdp2_offload.yaml"]
)
def test_gpu_configs_stop_where_there_is_no_gpu(
    words: list[str], tmp_path: Path, name: str
) -> None:
    message = refused(name, words)
    assert (
        f"accelerate_configs/{name} asks for an accelerator (use_cpu: false), but torch finds none"
        in message
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def write_config(folder: Path, **changes: object) -> Path:
    settings = yaml.safe_load((ROOT / "accelerate_configs/cpu_ddp.yaml").read_text()) | changes
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_multi_cpu_that_starts_one_process(words: list[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, distributed_type="MULTI_CPU")
    assert "asks for 2 processes, 1 run as one group. Fix: distributed_type: MULTI_GPU" in refused(
        config, words
    )


def test_cpu_flag_that_starts_one_process(words: list[str]) -> None:
    message = refused("cpu.yaml", words, "--cpu", "--num_processes", 2)
    assert "asks for 2 processes, 1 run as one group" in message


def test_fsdp1_on_the_cpu(words: list[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, distributed_type="FSDP", fsdp_config={"fsdp_version": 1})
    assert "asks for FSDP1 on the CPU" in refused(config, words)


def test_fsdp2_that_names_another_models_layer(words: list[str], tmp_path: Path) -> None:
    settings = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    settings["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecoderLayer"
    config = write_config(tmp_path, distributed_type="FSDP", fsdp_config=settings)
    message = refused(config, words)
    assert (
        "fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer: the model has no such layer. Allowed: BertLayer"
        in message
    )


def test_a_fault_on_two_ranks_is_one_message(words: list[str], tmp_path: Path) -> None:
    """Also where only rank 0 meets it, and the other's broken connection is but its echo."""
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na goal,Sport\n")
    message = refused("cpu_ddp.yaml", [*words, "--validation_file", str(rows)])
    assert len([line for line in message.splitlines() if line.startswith("error: ")]) == 1
    assert "line 2: label 'Sport' does not occur" in message
    assert "[rank1]" not in message


def test_fp16_that_would_be_off(words: list[str]) -> None:
    message = refused("cpu.yaml", words, "--mixed_precision", "fp16")
    assert "asks for mixed_precision: fp16, which is silently switched off on the CPU" in message


def test_accumulation_from_the_environment(words: list[str]) -> None:
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    done = run("python", "-m", "accel_ft.train", *words, check=False, env=environment)
    assert (done.returncode, "would override the accumulation steps" in done.stderr) == (2, True)

"""No silent fallback: what a YAML asks for runs, or the run stops and says why."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from conftest import ROOT, events_of, job_words, launch, run

# test_two_hosts.py runs the multi-node ones.
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_line_is_its_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# accelerate launch --config_file accelerate_configs/{path.name} ")
    job = Path(first.split("--config ")[1].split()[0])
    assert (ROOT / job).is_file()


class Refused(NamedTuple):
    """A start that must be refused: a file in accelerate_configs/, or changes to cpu_ddp.yaml; message; options."""

    config: str | dict[str, Any]
    message: str
    options: tuple[object, ...] = ()


NO_GPU = "accelerate_configs/{} asks for an accelerator (use_cpu: false), but torch finds none"
ALONE = ("--num_processes", 1)  # more ranks would repeat the message
LLAMA = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
LLAMA["fsdp_cpu_ram_efficient_loading"] = False
LLAMA["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecoderLayer"
REFUSED = {
    "MULTI_CPU starts one process": Refused(
        {"distributed_type": "MULTI_CPU"},
        "asks for 2 processes, but the process group has 1. Fix: for several, accelerate_configs/ddp.yaml or fsdp2.yaml",
    ),
    "--cpu starts one process": Refused(
        "cpu.yaml",
        "asks for 2 processes, but the process group has 1",
        ("--cpu", "--num_processes", 2),
    ),
    "FSDP1 on the CPU": Refused(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
        "asks for FSDP1 on the CPU",
        ALONE,
    ),
    "weights read by rank 0 alone": Refused(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
        "asks for fsdp_cpu_ram_efficient_loading (accelerate's default)",
        ALONE,
    ),
    "another model's layer": Refused(
        {"distributed_type": "FSDP", "fsdp_config": LLAMA},
        "fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer: the model has no such layer. Allowed: BertLayer",
        ALONE,
    ),
    "fp16 would be off": Refused(
        "cpu.yaml",
        "asks for mixed_precision: fp16, which is silently switched off on the CPU",
        ("--mixed_precision", "fp16"),
    ),
}
if not torch.accelerator.is_available():
    REFUSED["GPUs by a word alone"] = Refused(
        "", "accelerate launch asks for an accelerator", ("--multi_gpu", "--num_processes", 2)
    )
    for name in ("gpu.yaml", "ddp.yaml", "fsdp1.yaml", "fsdp2.yaml", "fsdp2_offload.yaml"):
        REFUSED[name] = Refused(name, NO_GPU.format(name), ALONE)


@pytest.fixture(scope="module")
def refusals(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows_file: Path, odd_file: Path
) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """Folder and output of each start; two run at a time, since most of a start is imports."""

    def start(case: Refused) -> tuple[Path, subprocess.CompletedProcess[str]]:
        folder = tmp_path_factory.mktemp("refused")
        config: str | None = str(case.config) or None
        if isinstance(case.config, dict):
            shipped = yaml.safe_load((ROOT / "accelerate_configs/cpu_ddp.yaml").read_text())
            config = str(folder / "launch.yaml")
            Path(config).write_text(yaml.safe_dump(shipped | case.config))
        job = job_words(tiny_model, rows_file, odd_file, folder / "run")
        command = [*case.options, "--main_process_port", 0, "-m", "accel_ft.train", *job]
        return folder, launch(config, *command, check=False, seconds=240)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSED, pool.map(start, REFUSED.values()), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(
    refusals: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], case: str
) -> None:
    folder, done = refusals[case]
    assert done.returncode != 0
    assert REFUSED[case].message in done.stderr
    assert "update" not in done.stdout
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_a_fault_on_two_ranks_is_one_message(words: list[str], tmp_path: Path) -> None:
    """Even if only rank 0 meets it, and rank 1 merely sees its connection break."""
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na goal,Sport\n")
    command = ["-m", "accel_ft.train", *words, "--validation_file", str(rows)]
    message = launch("cpu_ddp.yaml", *command, check=False, seconds=120).stderr
    told = [line for line in message.splitlines() if line.startswith("error: ")]
    echo = "error: rank 0 "  # what rank 1 says if rank 0 ends first
    assert len([line for line in told if not line.startswith(echo)]) == 1
    assert "line 2: label 'Sport' is none of these" in message
    assert "[rank1]" not in message


def test_fsdp2_of_a_model_it_cannot_shard(
    words: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    """BART's word embedding is in three modules, which accelerate's FSDP2 does not keep tied."""
    from transformers import AutoTokenizer, BartConfig, BartModel

    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    config = BartConfig(vocab_size=60, d_model=16, eos_token_id=3, pad_token_id=0, **layers)
    BartModel(config).save_pretrained(tmp_path / "bart")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "bart")
    job = [*words, "--model_name_or_path", str(tmp_path / "bart")]
    options = ["--main_process_port", 0, "-m", "accel_ft.train"]
    done = launch("cpu_fsdp2.yaml", *options, *job, check=False)
    told = "FSDP2: accelerate cannot shard BartForSequenceClassification: its word embedding is"
    assert f"error: {told} shared by modules: model.shared, " in done.stderr


def test_a_model_with_an_idle_parameter(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    """XLNet's `mask_emb` gets no gradient: DDP would wait for it and fail at the second update. AdamW has no state for it,
    which FSDP2 needs at a resume."""
    from transformers import AutoTokenizer, XLNetConfig, XLNetModel

    sizes = {"vocab_size": 60, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
    config = XLNetConfig(**sizes, pad_token_id=0, dropout=0.0, summary_last_dropout=0.0)
    XLNetModel(config).save_pretrained(tmp_path / "xlnet")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "xlnet")
    job = [*words, "--model_name_or_path", str(tmp_path / "xlnet"), "--max_steps", "4"]
    job += ["--save_steps", "2"]
    options = ("--main_process_port", 0, "--mixed_precision", "no", "-m", "accel_ft.train")
    done = launch("cpu_ddp.yaml", *options, *job)
    assert "parameters without gradients: transformer.mask_emb" in done.stderr
    checkpoint = tmp_path / "run/checkpoints/step_00000002"
    more = ["--output_dir", str(tmp_path / "fsdp2"), "--resume_from_checkpoint", str(checkpoint)]
    launch("cpu_fsdp2.yaml", *options, *job, *more)
    ddp, fsdp2 = (
        [event["loss"] for event in events_of(tmp_path / name) if event["event"] == "train"]
        for name in ("run", "fsdp2")
    )
    assert fsdp2 == pytest.approx(ddp[2:], rel=1e-5)


@pytest.mark.parametrize("size", ["16", "4"])
def test_one_rank_of_many(words: list[str], tmp_path: Path, size: str) -> None:
    """The start of a scaling series of 1, 2 and 4 ranks: on a CPU, accelerate wraps even one rank in DDP."""
    words = [*words, "--max_steps", "2", "--per_device_train_batch_size", size]
    words += ["--lora_alpha", "32"]
    done = launch("cpu_ddp.yaml", "--num_processes", 1, "-m", "accel_ft.train", *words)
    assert "lora_alpha has no effect on training without lora_r" in done.stderr
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_accumulation_from_the_environment(words: list[str]) -> None:
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    done = run("python", "-m", "accel_ft.train", *words, check=False, env=environment)
    assert (done.returncode, "would override the accumulation steps" in done.stderr) == (2, True)

"""What ships beside the package: job files and the news sample."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, run

from accel_ft.config import (
    DoctorConfig,
    EvaluateConfig,
    ExportConfig,
    PredictConfig,
    SearchConfig,
    TrainConfig,
    parse,
)
from accel_ft.data.sources import file_source

SAMPLE = ROOT / "examples/data/news_sample"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem
)
def test_job_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(TrainConfig, ["--config", str(path)], "train")


def test_news_sample() -> None:
    rows = {
        name: list(file_source(SAMPLE / f"{name}.csv").rows()) for name in ("train", "validation")
    }
    assert len(rows["train"]) >= 480
    assert len(rows["validation"]) >= 160
    texts = [text for split in rows.values() for _, text, _ in split]
    sentences = Counter(text.strip() for text in texts)
    assert max(sentences.values()) == 1
    for split in rows.values():
        counts = Counter(label for _, _, label in split)
        assert set(counts) == {"World", "Sports", "Business", "Sci/Tech"}
        assert len(set(counts.values())) == 1


PAGES = ["README.md", "examples/recipes.md", "examples/doctor.md"]
CONFIGS = {
    "train": TrainConfig,
    "doctor": DoctorConfig,
    "evaluate": EvaluateConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
    "search": SearchConfig,
}


def commands() -> list[str]:
    """Every command line that the pages show."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            lines += [line for line in block.splitlines() if re.search("LAUNCH|-m accel_ft", line)]
        lines += re.findall(r"`(accelerate launch [^`]*-m [^`]*)`", (ROOT / page).read_text())
    return [line.replace("LAUNCH", "accelerate launch -m accel_ft.train") for line in lines]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_are_valid(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys exist and take these values; files that a reader brings are taken to be there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("accel_ft.config._file_faults", lambda *_: iter(()))
    monkeypatch.setattr(SearchConfig, "rules", lambda _: iter(()))
    name, _, words = command.partition("accel_ft.")[2].partition(" ")
    listed = shlex.split(words)
    if name == "report":
        assert all(word.startswith("runs/") or word in ("--diff", "--output") for word in listed)
    elif "STRATEGY" not in command and "..." not in listed:
        base = {"predict": lambda _: {}, "train": lambda _: {}}.get(name, lambda _: {})
        parse(CONFIGS[name], listed, name, base)


def test_completion() -> None:
    """TAB gives the keys of the command that stands on the line."""
    script = """
    source examples/completion.bash
    complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _accel_ft; echo "${COMPREPLY[*]}"; }
    complete_words accelerate launch -m accel_ft.train --learning_r
    complete_words python -m accel_ft.export --for
    complete_words python READ
    """
    lines = run("bash", "-c", script).stdout.splitlines()
    assert lines == ["--learning_rate", "--format", "README.md"]

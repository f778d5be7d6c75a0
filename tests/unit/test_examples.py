"""What ships beside the package: job files, the news sample and shell completion."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, run

from accel_ft.config import DataConfig, TrainConfig
from accel_ft.data.sources import file_source
from accel_ft.settings import parse

SAMPLE = ROOT / "examples/data/news_sample"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem
)
def test_job_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(TrainConfig, ["--config", str(path)], "train")


def test_news_sample() -> None:
    rows = {
        name: list(file_source(SAMPLE / f"{name}.csv").rows(DataConfig()))
        for name in ("train", "validation")
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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str) -> None:
    """TAB completes the keys of the command on the line."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    script = """
    _of_others() { COMPREPLY=("$1 $2 $3"); }
    [[ -n $BASH_VERSION ]] && complete -F _of_others python
    source examples/completion.bash
    [[ -n $ZSH_VERSION ]] && emulate sh # as bashcompinit does around it
    complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _accel_ft; echo "${COMPREPLY[*]}"; }
    complete_words accelerate launch -m accel_ft.train --learning_r
    complete_words python3 -m accel_ft.export --for
    complete_words python3 -m accel_ft.export --k
    complete_words python3 READ
    complete_words accelerate launch -m accel_ft.do
    [[ -n $BASH_VERSION ]] && source examples/completion.bash # again, as a shell within a shell does
    COMP_WORDS=(python -m pyt) COMP_CWORD=2; [[ -n $BASH_VERSION ]] && _accel_ft python pyt -m; echo "$COMPREPLY"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = run(shell, "-c", script, env={"PATH": path}).stdout.splitlines()
    others = lines.pop()
    assert shell != "bash" or others.split() == ["python", "pyt", "-m"]
    expected = ["--learning_rate", "--format", "", "README.md", "accel_ft.doctor"]
    if shell == "zsh":  # it drops candidates with another prefix itself
        lines = [
            word
            for word, line in zip(expected, lines, strict=True)
            if word in line.split() or (word == "" and "--key" not in line.split())
        ]
    assert lines == expected

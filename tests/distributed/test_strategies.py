"""The same curve under every strategy; every checkpoint resumes under every strategy; real ranks on gloo."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from conftest import ROOT, events_of, job_words, launch, run, write_rows
from forked import on_ranks
from safetensors.torch import load_file

from accel_ft import evaluate, export
from accel_ft.checkpoint import convert, transaction
from accel_ft.config import DataConfig

STRATEGIES = {
    "single": (1, "cpu.yaml"),
    "ddp2": (2, "cpu_ddp.yaml"),
    "fsdp2": (2, "cpu_fsdp2.yaml"),
    "fsdp3": (3, "cpu_fsdp2.yaml"),
    "fsdp1": (2, "fsdp1.yaml"),  # worker.py allows it on the CPU
}
ADAPTED = {
    "lora": ["--lora_r", "4", "--learning_rate", "0.02"],
    "frozen": ["--freeze", "encoder", "--learning_rate", "0.1", "--layerwise_lr_decay", "0.9"],
}
ADAPTED_SAVED_AT = 5
SAVED_AT, LAST = 2, 12  # followed by ten updates, and by none


def on(strategy: str, folder: Path, *tasks: dict[str, Any], precision: str = "no") -> list[Any]:
    ranks, config = STRATEGIES[strategy]
    if strategy == "fsdp1":  # the shipped YAML, changed only for the CPU
        settings = yaml.safe_load((ROOT / "accelerate_configs" / config).read_text())
        settings["use_cpu"], settings["fsdp_config"]["fsdp_sync_module_states"] = True, False
        config = str(folder / config)
        Path(config).write_text(yaml.safe_dump(settings))
    return on_ranks(ranks, *tasks, config=config, precision=precision)


class Whole(NamedTuple):
    """Results under one strategy; a curve is the loss and the gradient norm of each update."""

    folder: Path
    curve: list[list[float]]
    sick: dict[str, list[list[float]]]
    adapted: dict[str, list[list[float]]]
    shares: Any = None


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, still_model: Path, rows_file: Path, odd_file: Path
) -> dict[str, "Whole"]:
    """By strategy, all on the same ranks: a run with checkpoints, and the other tasks."""
    runs = {}
    for strategy in STRATEGIES:
        folder = tmp_path_factory.mktemp(strategy)
        words = job_words(still_model, rows_file, odd_file, folder / "run")
        words += ["--save_steps", str(SAVED_AT)]
        tasks: list[dict[str, Any]] = [{"do": "curve", "words": words}]
        if strategy in ("fsdp2", "fsdp3"):
            tasks.append(
                {
                    "do": "shares",
                    "words": job_words(still_model, rows_file, odd_file, folder / "shares"),
                }
            )
        for policy in ("skip", "rollback"):
            words = job_words(still_model, rows_file, odd_file, folder / policy)
            words += ["--on_nonfinite", policy, "--save_steps", "3"]
            tasks.append({"do": "sick_curve", "words": words})
        for name, keys in ADAPTED.items() if strategy not in ("fsdp1", "fsdp3") else ():
            words = job_words(still_model, rows_file, odd_file, folder / name)
            words += [*keys, "--save_steps", str(ADAPTED_SAVED_AT)]
            tasks.append({"do": "curve", "words": words})
        curve, *others = on(strategy, folder, *tasks)
        shares = [others.pop(0)] if strategy in ("fsdp2", "fsdp3") else []
        sick = dict(zip(("skip", "rollback"), others[:2], strict=True))
        adapted = dict(zip(ADAPTED, others[2:], strict=False))
        runs[strategy] = Whole(folder / "run", curve, sick, adapted, *shares)
    return runs


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "single"])
def test_one_curve(whole: dict[str, Any], strategy: str) -> None:
    for ours, theirs in zip(whole[strategy].curve, whole["single"].curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("kind", ADAPTED)
@pytest.mark.parametrize("strategy", ["ddp2", "fsdp2"])
def test_adapters_have_one_curve(whole: dict[str, Any], strategy: str, kind: str) -> None:
    """Adapters, or a partly frozen model: the same curve and final model under every strategy."""
    for ours, theirs in zip(
        whole[strategy].adapted[kind], whole["single"].adapted[kind], strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-4)
    models = [
        load_file(whole[name].folder.with_name(kind) / "model/model.safetensors")
        for name in (strategy, "single")
    ]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("source", "target"), [("fsdp2", "ddp2"), ("ddp2", "fsdp2")])
def test_adapters_resume_under_any_strategy(
    whole: dict[str, Any], source: str, target: str, tmp_path: Path
) -> None:
    """Checkpoints hold only adapters and head, and resume under another strategy."""
    folder = whole[source].folder.with_name("lora")
    checkpoint = folder / f"checkpoints/step_{ADAPTED_SAVED_AT:08d}"
    for _, path in transaction.list_published(folder / "checkpoints"):
        weights = convert.read_weights(path)
        assert all("lora_" in name or "classifier" in name for name in weights)
    words = yaml.safe_load((folder / "config.yaml").read_text())
    words |= {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": str(checkpoint)}
    words["report_to"] = "none"
    listed = [w for k, v in words.items() if v not in (None, []) for w in (f"--{k}", str(v))]
    (curve,) = on(target, tmp_path, {"do": "curve", "words": listed})
    for ours, theirs in zip(curve, whole["single"].adapted["lora"][ADAPTED_SAVED_AT:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("by_layers", [(), ["--dynamo_use_regional_compilation"]])
def test_compiled_and_sharded_adapters_are_loaded(
    by_layers: Sequence[str], tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """Through compile's wrapper, torch would demand frozen parameters of the best checkpoint, loaded at the end."""
    words = [*job_words(tiny_model, rows_file, odd_file, tmp_path / "run"), "--lora_r", 2]
    words += ["--load_best_model_at_end", "true", "--eval_steps", 1, "--max_steps", 2]
    words += ["--max_seq_length", 8]  # one width: each new one is compiled
    options = ("--mixed_precision", "no", "--dynamo_backend", "eager", *by_layers)
    launch("cpu_fsdp2.yaml", *options, "-m", "accel_ft.train", *words)
    assert events_of(tmp_path / "run")[-1]["model_step"] == 1
    assert "bert.embeddings.word_embeddings.weight" in load_file(
        tmp_path / "run" / "model" / "model.safetensors"
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp3"])
def test_sharding_is_real(whole: dict[str, Any], strategy: str) -> None:
    """Each rank holds its share of parameters and optimizer state, a little more if rows do not divide evenly. No weights
    of a layer are joined: they would stay gathered until the backward pass.
    """
    shares = whole[strategy].shares
    assert shares["ours"] == ["first_token_attention"]
    ranks = STRATEGIES[strategy][0]
    assert shares["kinds"] == ["DTensor"]
    assert len(shares["local"]) == ranks
    for what in (0, 1):
        held = [local[what] for local in shares["local"]]
        assert sum(held) == shares["whole"][what]
        assert max(held) < 1.15 * shares["whole"][what] / ranks


PAIRS = [(a, b) for a in ("single", "ddp2", "fsdp2") for b in ("single", "ddp2", "fsdp2")]
PAIRS += [("ddp2", "fsdp3"), ("fsdp3", "single")]
PAIRS += [("fsdp1", "fsdp1"), ("fsdp1", "single"), ("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")]
PAIRS.remove(("single", "single"))  # in test_run.py
PAIRS.remove(("ddp2", "ddp2"))  # in test_ranks.py


@pytest.fixture(scope="module")
def resumed(
    whole: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    still_model: Path,
    rows_file: Path,
    odd_file: Path,
) -> dict[tuple[str, int, str], tuple[Path, list[list[float]]]]:
    """The resumed runs, by source strategy, update of the checkpoint, and target strategy."""
    results = {}
    for target in STRATEGIES:
        folder = tmp_path_factory.mktemp(f"into_{target}")
        sources = [(a, SAVED_AT) for a, b in PAIRS if b == target]
        sources += [("single", LAST)] if target in ("ddp2", "fsdp2") else []
        tasks = []
        for source, step in sources:
            words = job_words(still_model, rows_file, odd_file, folder / f"{source}_{step}")
            checkpoint = whole[source].folder / "checkpoints" / f"step_{step:08d}"
            words += ["--save_steps", str(LAST)]
            tasks.append({"do": "resume_from", "words": words, "checkpoint": str(checkpoint)})
        for source, curve in zip(sources, on(target, folder, *tasks), strict=True):
            results[*source, target] = (folder / "{}_{}".format(*source), curve)
    return results


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_checkpoint_resumes_under_any_strategy(
    whole: dict[str, Any], resumed: dict[tuple[str, int, str], Any], source: str, target: str
) -> None:
    """The updates that follow are those of the uninterrupted run, bit for bit if the strategy is the same."""
    folder, curve = resumed[source, SAVED_AT, target]
    expected = whole[source].curve[SAVED_AT:]
    if source == target:
        assert curve == expected
        ours, theirs = (
            (path / "model" / "model.safetensors").read_bytes()
            for path in (folder, whole[source].folder)
        )
        assert ours == theirs
    else:
        for ours, theirs in zip(curve, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_commands_open_sharded_checkpoints(whole: dict[str, Any], tmp_path: Path) -> None:
    """Even when launched under FSDP, whose `prepare` refuses a model without an optimizer."""
    scores = {}
    name = f"step_{SAVED_AT:08d}"
    words = [
        "-m",
        "accel_ft.evaluate",
        "--checkpoint",
        whole["fsdp2"].folder / "checkpoints" / name,
    ]
    launch(
        "cpu_fsdp2.yaml", "--mixed_precision", "no", *words, "--output", tmp_path / "launched.json"
    )
    for strategy in ("single", "fsdp2"):
        checkpoint = whole[strategy].folder / "checkpoints" / name
        evaluate.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "scores.json")])
        scores[strategy] = json.loads((tmp_path / "scores.json").read_text())
    assert scores["fsdp2"]["loss"] == pytest.approx(scores["single"]["loss"], rel=1e-6)
    assert scores["fsdp2"]["accuracy"] == scores["single"]["accuracy"]
    assert json.loads((tmp_path / "launched.json").read_text()) == scores["fsdp2"]


def test_bf16_as_the_yaml_has_it(
    tmp_path: Path, tiny_model: Path, rows_file: Path, odd_file: Path
) -> None:
    """The shipped YAML on the command line, with dropout: the loss is within bf16's precision of one process's."""
    losses = []
    for config in ("cpu_fsdp2.yaml", "cpu.yaml"):
        output_dir = tmp_path / config
        words = job_words(tiny_model, rows_file, odd_file, output_dir)
        words += ["--max_steps", "2", "--save_steps", "2"]
        done = launch(config, "-m", "accel_ft.train", *words)
        assert "returned a view" not in done.stderr  # a warning of FSDP2
        receipt = json.loads((output_dir / "receipt.json").read_text())
        assert receipt["strategy"]["mixed_precision"] == "bf16"
        first = json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[0])
        losses.append(first["loss"])
    assert receipt["strategy"]["distributed_type"] == "NO"
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_doctor_finds_nothing_under_fsdp1(
    tmp_path: Path, still_model: Path, rows_file: Path, odd_file: Path
) -> None:
    words = job_words(still_model, rows_file, odd_file, tmp_path / "run")
    task = {"do": "examined", "words": words, "json": tmp_path / "found.json"}
    (found,) = on("fsdp1", tmp_path, task)
    assert [each for each in found if each["verdict"] == "FAIL"] == []
    passed = {each["check"] for each in found if each["verdict"] == "PASS"}
    assert {"resume: optimizer", "resume: the next update"} <= passed


@pytest.mark.parametrize("strategy", ["ddp2", "fsdp2", "fsdp1"])
def test_a_nan_loss_on_one_rank_is_seen_by_all(whole: dict[str, Any], strategy: str) -> None:
    """The loss of rank 1's fifth micro-batch is NaN. Until then the curve is the usual one; then both ranks skip the
    update, or roll back and pass over it. Rollback's save before the first update does not change the curve.
    """  # fmt: skip
    for policy, curve in whole[strategy].sick.items():
        assert curve[:4] == whole[strategy].curve[:4]
        assert curve[4][0] is None
        assert len(curve) == 12
        assert all(loss is not None and norm is not None for loss, norm in curve[5:])
        events = events_of(whole[strategy].folder.parent / policy)
        (event,) = [e for e in events if e["event"] == "nonfinite"]
        assert (event["update"], event["policy"], event["losses"]) == (5, policy, ["nan"])
        assert event["step"] == {"skip": 5, "rollback": 3}[policy]


LOGITS = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
rows, *folders = sys.argv[1:]
assert "accel_ft" not in sys.modules
texts = open(rows).read().splitlines()
found = {}
for folder in folders:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found[folder] = logits.tolist(), model.config.id2label
print(json.dumps(found))
"""


def test_export_of_every_strategy(whole: dict[str, Any], tmp_path: Path) -> None:
    """Exported from the last checkpoint and read by transformers alone, on 100 rows: bit for bit the logits of the run's
    final model, which is gathered from all ranks; and, up to rounding, those of the other strategies.
    """
    from accel_ft.data.sources import file_source

    rows_csv = write_rows(tmp_path / "rows.csv", 100, seed=5)
    texts = tmp_path / "rows.txt"
    texts.write_text(
        "".join(text + "\n" for _, text, _ in file_source(rows_csv).rows(DataConfig()))
    )
    exports = {strategy: tmp_path / strategy for strategy in ("single", "ddp2", "fsdp2")}
    for strategy, exported in exports.items():
        checkpoint = whole[strategy].folder / "checkpoints" / f"step_{LAST:08d}"
        export.main(["--checkpoint", str(checkpoint), "--output", str(exported)])
    models = {strategy: whole[strategy].folder / "model" for strategy in exports}
    both = [*exports.values(), *models.values()]
    found = json.loads(run("python", "-c", LOGITS, texts, *both, cwd=tmp_path).stdout)
    logits = {}
    for strategy, exported in exports.items():
        ours, names = found[str(exported)]
        theirs, _ = found[str(models[strategy])]
        assert ours == theirs
        assert sorted(names.values()) == ["Business", "Sci/Tech", "Sports", "World"]
        card = (exported / "README.md").read_text()
        assert card.startswith("---\n")
        assert "| `learning_rate` | `0.001` |" in card
        logits[strategy] = [value for row in ours for value in row]
    for strategy in ("ddp2", "fsdp2"):
        assert logits[strategy] == pytest.approx(logits["single"], abs=1e-5)


def test_the_same_state_leaves_the_same_model(
    whole: dict[str, Any], resumed: dict[tuple[str, int, str], Any]
) -> None:
    """One process's last checkpoint, resumed under DDP and FSDP2, leaves a model with the same weights bit for bit."""
    expected = load_file(whole["single"].folder / "model" / "model.safetensors")
    for strategy in ("ddp2", "fsdp2"):
        folder, _ = resumed["single", LAST, strategy]
        found = load_file(folder / "model" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

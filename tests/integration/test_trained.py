"""What is trained: frozen encoders, layer-wise learning rates, gradient checkpointing, adapters."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LATEST, cut_off, events_of, job_words, run_hash
from safetensors.torch import load_file, save_file

from accel_ft import export, load_classifier, train
from accel_ft.config import TrainConfig
from accel_ft.errors import CheckpointError, ConfigError
from accel_ft.model import adapters, load
from accel_ft.model.adapters import choose_trained
from accel_ft.model.optim import layer_depths, make_optimizer


def test_a_frozen_encoder(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    train.main([*words, "--freeze", "encoder", "--learning_rate", "0.1"])
    before = load_file(tiny_model / "model.safetensors")
    after = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(before[name], after[f"bert.{name}"]) for name in before)
    saved = [
        load_file(p / "model.safetensors") for p in sorted((tmp_path / "run/checkpoints").iterdir())
    ]
    assert not torch.equal(saved[0]["classifier.weight"], saved[-1]["classifier.weight"])
    whole = run_hash(tmp_path / "run")
    cut_off(tmp_path / "run", 5)
    train.main(
        [
            *words,
            "--freeze",
            "encoder",
            "--learning_rate",
            "0.1",
            "--resume_from_checkpoint",
            "latest",
        ]
    )
    assert run_hash(tmp_path / "run") == whole


def plain(model: Path) -> torch.nn.Module:
    config = load.load_model_config(str(model), num_labels=4)
    return load.load_for_training(str(model), config, torch.device("cpu"))[0]


def test_layerwise_learning_rates(tiny_model: Path) -> None:
    """With two layers: the head at the full rate, the upper layer at a half, the embeddings at an eighth."""
    model = plain(tiny_model)
    optimizer = make_optimizer(model, 1.0, 0.01, 0.5)
    rate_of = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    rates = {name: rate_of[id(p)] for name, p in model.named_parameters()}
    assert rates["classifier.weight"] == rates["bert.pooler.dense.bias"] == 1.0
    assert rates["bert.encoder.layer.1.output.dense.weight"] == 0.5
    assert rates["bert.encoder.layer.0.attention.self.query.bias"] == 0.25
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.125
    assert len(rates) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 1.0  # this rate is logged
    assert set(layer_depths(torch.nn.Linear(2, 2)).values()) == {0}


def test_layerwise_rates_of_an_encoder_and_a_decoder_of_other_heights() -> None:
    """As in distilbart: the decoder's single layer is as near to the head as the encoder's last one."""
    from transformers import AutoModelForSequenceClassification

    config = architectures()["bart"]
    config.encoder_layers, config.decoder_layers = 4, 1
    depths = layer_depths(AutoModelForSequenceClassification.from_config(config))
    found = {name: depth for name, depth in depths.items() if name.endswith("fc1.weight")}
    stacks = {"encoder": [4, 3, 2, 1], "decoder": [1]}
    assert found == {
        f"model.{stack}.layers.{number}.fc1.weight": depth
        for stack, depths in stacks.items()
        for number, depth in enumerate(depths)
    }
    assert depths["model.shared.weight"] == 5
    towers = torch.nn.ModuleDict({"chars": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    towers["layers"] = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    assert layer_depths(towers)["chars.0.weight"] == 3  # as in CANINE, below the others


def test_gradient_checkpointing_changes_no_number(words: list[str], tmp_path: Path) -> None:
    """The backward pass draws the same dropout masks again."""
    train.main(words)
    train.main([*words, "--gradient_checkpointing", "--output_dir", str(tmp_path / "again")])
    assert run_hash(tmp_path / "run") == run_hash(tmp_path / "again")


def test_checkpointing_is_asked_of_the_model(tiny_model: Path) -> None:
    model = plain(tiny_model)
    choose_trained(model, TrainConfig(gradient_checkpointing=True))
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    frozen = choose_trained(
        plain(tiny_model), TrainConfig(gradient_checkpointing=True, freeze="encoder")
    )
    assert not any(getattr(m, "gradient_checkpointing", False) for m in frozen.modules())
    type(model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ConfigError, match="BertForSequenceClassification does not support it"):
            choose_trained(model, TrainConfig(gradient_checkpointing=True))
    finally:
        del type(model).supports_gradient_checkpointing


# Adapters


LORA = ["--lora_r", "4", "--learning_rate", "0.02", "--lora_dropout", "0.1"]


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows_file: Path, odd_file: Path
) -> Path:
    """A run that has trained adapters, every update saved."""
    run = tmp_path_factory.mktemp("adapted") / "run"
    train.main([*job_words(tiny_model, rows_file, odd_file, run), *LORA])
    return run


def test_adapters(adapted: Path, tiny_model: Path) -> None:
    """Checkpoints hold adapters and head, model/ the merged whole, which scores the same."""
    run = adapted
    checkpoint = max((run / "checkpoints").iterdir())
    saved = load_file(checkpoint / "model.safetensors")
    assert all("lora_" in name or "classifier" in name for name in saved)
    whole = load_file(run / "model/model.safetensors")
    assert sum(v.numel() for v in saved.values()) < 0.4 * sum(v.numel() for v in whole.values())
    assert not any("lora" in name for name in whole)
    before = load_file(tiny_model / "model.safetensors")
    assert torch.equal(
        before["embeddings.word_embeddings.weight"], whole["bert.embeddings.word_embeddings.weight"]
    )
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[name], whole[f"bert.{name}"])
    texts = ["goal striker league", "shares profit bank", "orbit chip"]
    scores = load_classifier(run, all_scores=True).predict(texts)
    assert load_classifier(run / "model", all_scores=True).predict(texts) == scores
    # Merged on loading, so equal only up to rounding.
    again = load_classifier(checkpoint, all_scores=True).predict(texts)
    for mine, other in zip(again, scores, strict=True):
        assert mine["scores"] == pytest.approx(other["scores"], rel=1e-6)


def test_adapters_of_another_base_do_not_go_on(
    words: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    words = [*words, *LORA, "--model_name_or_path", str(base)]
    stopped_words = [*words, "--max_steps", "4"]
    train.main(stopped_words)
    weights = load_file(base / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, base / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(CheckpointError, match="belongs to another job(.|\n)*pretrained: "):
        train.main([*words, "--max_steps", "6", "--resume_from_checkpoint", "latest"])
    checkpoint = str(max((tmp_path / "run/checkpoints").iterdir()))
    another = f"{base}: the adapters were trained on other weights: model.safetensors was"
    with pytest.raises(CheckpointError, match=another):
        load_classifier(checkpoint)
    torch.save(weights, base / "pytorch_model.bin")  # the right weights, under another file name
    (base / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors was .*, is not there..."):
        load_classifier(checkpoint)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (base / "pytorch_model.bin").unlink()
    assert load_classifier(checkpoint).predict(["a goal"])


def test_a_base_that_is_not_here(
    words: list[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path that does not exist in the current folder would be looked for on the Hub."""
    shutil.copytree(tiny_model, tmp_path / "my/base")
    monkeypatch.chdir(tmp_path)
    train.main([*words, *LORA, "--model_name_or_path", "my/base", "--max_steps", "1"])
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    told = "base_model_name_or_path=my/base: the adapters' pretrained model cannot be loaded. Fix: start"
    with pytest.raises(ConfigError, match=told):
        load_classifier(max((tmp_path / "run/checkpoints").iterdir()))
    base = tmp_path / "my/base"  # an absolute path, deleted later
    words += [*LORA, "--model_name_or_path", str(base), "--output_dir", str(tmp_path / "whole")]
    train.main([*words, "--max_steps", "1"])
    shutil.rmtree(base)
    with pytest.raises(
        ConfigError, match=f"={base}: the adapters' pretrained model cannot be loaded"
    ):
        load_classifier(max((tmp_path / "whole/checkpoints").iterdir()))


def test_a_base_that_changes_beside_the_run(
    words: list[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights change before the adapters are merged into them: nobody has evaluated such a model."""
    base, merged = shutil.copytree(tiny_model, tmp_path / "base"), adapters.merged
    weights = load_file(base / "model.safetensors")

    def merged_late(*args: Any) -> Any:
        save_file({name: 2 * value for name, value in weights.items()}, base / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        return merged(*args)

    monkeypatch.setattr(adapters, "merged", merged_late)
    words = [*words, *LORA, "--model_name_or_path", str(base), "--max_steps", "2"]
    with pytest.raises(CheckpointError, match="trained on other weights: model.safetensors was"):
        train.main(words)
    assert not (tmp_path / "run/model").exists()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(adapters, "merged", merged)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert load_classifier(tmp_path / "run").predict(["a goal"])


def architectures() -> dict[str, Any]:
    """Return configs of small models of several architectures."""
    from transformers import (
        BartConfig,
        BertConfig,
        DebertaV2Config,
        DistilBertConfig,
        GPT2Config,
        ModernBertConfig,
        MraConfig,
        PhimoeConfig,
        Qwen3NextConfig,
        RobertaConfig,
        Zamba2Config,
    )  # fmt: skip

    small = {"vocab_size": 60, "pad_token_id": 0}
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    of_bart = {"d_model": 16, "eos_token_id": 2} | {
        f"{part}_{size}": number
        for part in ("encoder", "decoder")
        for size, number in {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
    }
    of_experts = {"num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    of_experts |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return {
        "bert": BertConfig(**small, **sizes),
        "roberta": RobertaConfig(**small, **sizes),
        "deberta": DebertaV2Config(**small, **sizes),
        "modernbert": ModernBertConfig(**small, **sizes),
        "mra": MraConfig(**small, **sizes),  # saves a buffer, too
        "distilbert": DistilBertConfig(**small, dim=16, hidden_dim=32, n_layers=2, n_heads=2),
        "gpt2": GPT2Config(**small, n_embd=16, n_layer=2, n_head=2),
        "bart": BartConfig(**small, **of_bart),  # its word embedding has three names
        # The experts are parameters, which peft adapts directly; the router is a linear layer.
        "qwen3_next": Qwen3NextConfig(
            **small, **sizes, **of_experts, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_num_key_heads=2, linear_num_value_heads=2, layer_types=["full_attention"] * 2,
        ),
        "phimoe": PhimoeConfig(**small, **sizes, **of_experts, num_local_experts=2),
        # Several of its linear layers share one weight.
        "zamba2": Zamba2Config(
            **small, **sizes | {"num_hidden_layers": 4}, use_mem_rope=False, num_mem_blocks=1,
            layers_block_type=["mamba", "hybrid"] * 2, mamba_headdim=8, n_mamba_heads=4,
            mamba_ngroups=1, mamba_d_state=8, chunk_size=8, adapter_rank=4, mamba_expand=2,
            attention_head_dim=16, attention_hidden_size=32,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["FNet", "ConvBert", "Nystromformer", "Canine", "Bert"])
def test_a_model_that_reads_padding_is_told(
    kind: str, words: list[str], tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """FNet takes no attention mask; the others, except BERT, apply theirs in some layers only."""
    import transformers

    sizes = dict.fromkeys(("hidden_size", "embedding_size", "intermediate_size"), 16)
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=60, **sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("accel_ft.runtime.logging.setup_logging", lambda is_main: None)
    words += ["--max_steps", "1", "--model_name_or_path", str(tmp_path / "model")]
    train.main([*words, *["--lora_r", "2"] * (kind == "FNet")])
    told = f"padding changes the outputs of {kind}ForSequenceClassification"
    assert (told in caplog.text) == (kind != "Bert")


KINDS = [
    "bert", "roberta", "deberta", "modernbert", "mra", "distilbert", "gpt2", "bart", "qwen3_next",
    "phimoe", "zamba2",
]  # fmt: skip


@pytest.mark.parametrize("targets", [(), "first"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_trained_and_saved(
    kind: str, targets: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the head's layers: no parameter drawn at random may be frozen, or drawn again on loading."""
    from transformers import AutoModel
    from transformers.utils import logging

    torch.manual_seed(0)
    AutoModel.from_config(architectures()[kind]).save_pretrained(tmp_path)
    config = load.load_model_config(str(tmp_path), num_labels=3)
    plain, drawn = load.load_for_training(str(tmp_path), config, None)
    assert drawn
    frozen = choose_trained(plain, TrainConfig(freeze="encoder"), drawn)
    assert {n for n, p in frozen.named_parameters() if p.requires_grad} >= set(drawn)
    plain, drawn = load.load_for_training(str(tmp_path), config, None)
    if targets == "first":
        linear = [
            n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear | adapters.Conv1D)
        ]
        targets = (next(n.rpartition(".")[2] for n in linear if "." in n),)
    job = TrainConfig(model_name_or_path=str(tmp_path), lora_r=2, lora_target_modules=targets)
    model = choose_trained(plain, job, drawn)
    trained = {
        n.replace(".modules_to_save.default", "").removeprefix("base_model.model.")
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert set(drawn) <= trained
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval()
    ids = torch.tensor([[5, 6, 7, 2, 0], [9, 10, 11, 12, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = model(**inputs).logits
    weights = dict(model.state_dict())
    shown, loading = [logging.WARNING], load.load_for_training
    logging.set_verbosity_warning()
    monkeypatch.setattr(
        load, "load_for_training", lambda *a: shown.append(logging.get_verbosity()) or loading(*a)
    )
    torch.manual_seed(1)  # other random values must not matter
    again = adapters.merged(config, adapters.peft_config(model).to_dict(), weights).eval()
    torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    shown.append(logging.get_verbosity())
    assert shown == [logging.WARNING, logging.ERROR, logging.WARNING]  # no warning of a new head
    if kind != "gpt2":
        name = next(name for name in weights if "lora_" in name)
        with pytest.raises(CheckpointError, match="adapters do not fit"):
            adapters.merged(
                config,
                adapters.peft_config(model).to_dict(),
                {k: v for k, v in weights.items() if k != name},
            )


def test_adapters_resume_bit_for_bit(adapted: Path, words: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(adapted, tmp_path / "run")
    cut_off(run, 5)
    train.main([*words, *LORA, *LATEST])
    assert run_hash(run) == run_hash(adapted)


def test_the_layers_with_adapters_are_written_in_one_order(adapted: Path) -> None:
    """peft keeps them in a set: unsorted, the same job would write other bytes each time."""
    about = adapted / "checkpoints/step_00000012/adapter_config.json"
    names = json.loads(about.read_text())["target_modules"]
    assert names == sorted(names)
    assert len(names) > 5


def test_a_damaged_description_of_adapters(tmp_path: Path) -> None:
    about = tmp_path / "adapter_config.json"
    for content in ('{"r": 4}', "[]", "{"):
        about.write_text(content)
        with pytest.raises(CheckpointError, match="adapter_config.json: cannot be read: "):
            adapters.read_adapters(tmp_path)


def test_adapters_are_exported(adapted: Path, tmp_path: Path) -> None:
    checkpoint = max((adapted / "checkpoints").iterdir())
    export.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "exported")])
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "exported", adapted / "model")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert load_classifier(tmp_path / "exported").predict(["goal"])[0]["label"]


@pytest.mark.parametrize("kind", ["bart", "deberta", "bert"])
def test_a_head_that_is_there_is_trained_whole(kind: str, tmp_path: Path) -> None:
    """A head from an earlier job may have any name."""
    from transformers import AutoModelForSequenceClassification

    config = architectures()[kind]
    config.num_labels = 4
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model, new = load.load_for_training(str(tmp_path), config, None)
    assert not new
    base = {id(p) for p in model.base_model.parameters()}
    outside = {name for name, p in model.named_parameters() if id(p) not in base}
    model = choose_trained(model, TrainConfig(lora_r=2), new)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole = {n.replace(".modules_to_save.default", "") for n in trained if "lora_" not in n}
    assert outside
    assert whole == {f"base_model.model.{name}" for name in outside}


def test_layers_that_have_one_weight_in_common(tmp_path: Path) -> None:
    """Each layer would get its own adapters, and all of them would be added to the one weight."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(architectures()["zamba2"])
    job = TrainConfig(lora_r=2, lora_target_modules=("in_proj", "q_proj"))
    with pytest.raises(ConfigError, match="=q_proj: .*q_proj shares its weight with ano"):
        choose_trained(model, job)


def test_an_encoder_that_holds_its_head(tiny_model: Path) -> None:
    """As in Perceiver: if it is frozen, no parameter is left to train, and the optimizer would fail."""
    config = load.load_model_config(str(tiny_model), num_labels=3)
    model, _ = load.load_for_training(str(tiny_model), config, None)
    model.classifier.requires_grad_(False)
    with pytest.raises(ConfigError, match="has its head in its encoder.* Fix: --freeze none"):
        choose_trained(model, TrainConfig(freeze="encoder"))


def test_layers_that_are_not_there(words: list[str]) -> None:
    for names in ("quary", "value,quary"):  # peft accepts a list if one of them exists
        with pytest.raises(
            ConfigError,
            match="lora_target_modules=quary: .*Did you mean `query`.* Allowed: .*dense, key, query, value",
        ):
            train.main([*words, *LORA, "--lora_target_modules", names])
    with pytest.raises(ConfigError, match="^lora_target_modules=self: .*not supported") as fault:
        train.main(
            [*words, *LORA, "--lora_target_modules", "self"]
        )  # peft's message has seven lines
    assert "\n" not in str(fault.value)
    for names in ("query,classifier", "classifier"):
        with pytest.raises(ConfigError, match="_modules=classifier: the head is trained in full. "):
            train.main([*words, *LORA, "--lora_target_modules", names])
    with pytest.raises(ConfigError, match="freeze=encoder: given together with lora_r=4"):
        train.main([*words, *LORA, "--freeze", "encoder"])


def test_keys_reach_what_they_are_for(words: list[str], tmp_path: Path) -> None:
    """Each setting changes the losses. With layer-wise decay, the logged rate is still the full one."""
    words += ["--max_steps", "4"]
    losses, rates = [], {}
    for name, more in {
        "plain": [],
        "smooth": ["--label_smoothing_factor", "0.5"],
        "decayed": ["--layerwise_lr_decay", "0.5"],
        "lora": LORA,
        "scaled": [*LORA, "--lora_alpha", "64"],
        "dropped": [*LORA, "--lora_dropout", "0.5"],
    }.items():
        train.main([*words, *more, "--output_dir", str(tmp_path / name)])
        events = [e for e in events_of(tmp_path / name) if e["event"] == "train"]
        losses.append([e["loss"] for e in events])
        rates[name] = [e["learning_rate"] for e in events]
    assert len({tuple(each) for each in losses}) == 6
    assert rates["decayed"] == rates["plain"]

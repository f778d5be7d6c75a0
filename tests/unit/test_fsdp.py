"""The layer classes that FSDP wraps, derived from the model; what it reduces and gathers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForSequenceClassification

from accel_ft.errors import LaunchError
from accel_ft.model.embedding import why_unshardable
from accel_ft.runtime.fsdp import configure, layer_classes, leave_embedding_sharded

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "bert": (SMALL, "BertLayer"),
    "distilbert": ({"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, "TransformerBlock"),
    "roberta": (SMALL, "RobertaLayer"),
    "deberta-v2": (SMALL, "DebertaV2Layer"),
    "electra": (SMALL, "ElectraLayer"),
    "albert": (SMALL | {"embedding_size": 16}, "AlbertLayerGroup"),
    "modernbert": (SMALL | TOKENS | {"cls_token_id": 1, "sep_token_id": 2}, "ModernBertEncoderLayer"),
    "gpt2": (TOKENS | {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2}, "GPT2Block"),
    "llama": (SMALL | TOKENS, "LlamaDecoderLayer"),
    # Layers in lists of lists.
    "funnel": ({"vocab_size": 100, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}, "FunnelLayer"),
    "qwen2": (SMALL | TOKENS | {"num_key_value_heads": 2}, "Qwen2DecoderLayer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_layers_of_the_usual_models(kind: str) -> None:
    settings, layer = MODELS[kind]
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model(kind, **settings)
        )
    assert layer_classes(model) == [layer]


def test_models_that_cannot_be_sharded() -> None:
    def made(kind: str, **settings: Any) -> Any:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(
                AutoConfig.for_model(kind, **settings)
            )

    assert why_unshardable(made("bert", **SMALL)) is None
    squeezed = made("squeezebert", **SMALL, embedding_size=32)
    assert why_unshardable(squeezed) == "it bypasses its layers' hooks"
    without = made("canine", **{k: v for k, v in SMALL.items() if k != "vocab_size"})
    assert why_unshardable(without) == "its get_input_embeddings() does not work"


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_are_reduced_in_float32(version: int) -> None:
    """accelerate's bf16 policy would sum gradients in bf16, and round FSDP1's buffers; DDP does neither."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
    )
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), distributed_type=DistributedType.FSDP,
        gradient_state=SimpleNamespace(plugin_kwargs={}),
    )  # fmt: skip
    with torch.device("meta"):
        settings, layer = MODELS["bert"]
        config = AutoConfig.for_model("bert", **settings)
        configure(accelerator, AutoModelForSequenceClassification.from_config(config))
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert getattr(policy, "buffer_dtype", torch.float32) == torch.float32
    assert ("sync_each_batch" in accelerator.gradient_state.plugin_kwargs) == (version == 1)
    assert plugin.transformer_cls_names_to_wrap == [layer]


def test_a_checkpoint_that_only_fsdp_could_open_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), distributed_type=DistributedType.FSDP
    )
    with pytest.raises(LaunchError, match="FULL_STATE_DICT: only FSDP could open"):
        configure(accelerator, torch.nn.Linear(2, 2))


def test_layers_are_named_with_or_without_blanks() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT",
        transformer_cls_names_to_wrap=["BertLayer", " BertPooler"],
    )  # fmt: skip
    state = SimpleNamespace(fsdp_plugin=plugin)
    with torch.device("meta"):
        config = AutoConfig.for_model("bert", **MODELS["bert"][0])
        model = AutoModelForSequenceClassification.from_config(config)
    configure(SimpleNamespace(state=state, distributed_type=DistributedType.FSDP), model)
    assert plugin.transformer_cls_names_to_wrap == ["BertLayer", "BertPooler"]


def test_the_backward_pass_does_not_gather_the_word_embedding() -> None:
    """The backward pass adds to rows of the gradient, and does not read the weight."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    gathered = []
    try:
        for leaves in (lambda _: None, leave_embedding_sharded):
            model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
            for module in (*model, model):
                fully_shard(module)
            leaves(model)
            loss = model(torch.arange(8)).sum()
            with CommDebugMode() as counted:
                loss.backward()
            gathered.append(counted.comm_counts[torch.ops.c10d._allgather_base_])
            assert model[0].weight.grad is not None
    finally:
        dist.destroy_process_group()
    assert gathered == [2, 1]

"""The gradient of the word embedding on a CPU: only the rows that a batch has read.

torch makes a whole one for each batch: of MiniLM's 30,522 rows a batch reads about 700, and 47 MB
are taken, zeroed and, under DDP, sent. Rows are sent in their place; the optimizer then gets a
whole one, in memory that is kept.
"""

import contextlib
from typing import Any

import torch
from torch import nn


def word_embedding(model: Any) -> Any:
    """Return the module that a model says its tokens go in by; None where it does not say."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()
    return None


def tied_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold the word embedding's weight, where it is not its
    own alone: BART's and T5's.
    """
    weight = getattr(word_embedding(model), "weight", None)
    named = [(name, getattr(module, "weight", None)) for name, module in model.named_modules()]
    holders = [name for name, held in named if held is not None and held is weight]
    return holders if len(holders) > 1 else []


def why_unshardable(model: Any) -> str | None:
    """Return why accelerate's FSDP2 cannot shard a plain model; None where it can."""
    if tied := tied_modules(model):
        return f"its word embedding is in several places, {', '.join(tied)}"
    if not isinstance(word_embedding(model), nn.Module):
        return "it does not say which module its tokens go in by"
    if model.config.model_type == "squeezebert":
        return "it passes over its layers' hooks"
    return None


def make_sparse(model: nn.Module) -> None:
    """Let a model's word embedding give a sparse gradient. To be called before DDP wraps it.

    A frozen one stays as it is, one whose weight another module has too, and one with a forward
    pass of its own.
    """
    embedding = word_embedding(model)
    if getattr(type(embedding), "forward", None) is not nn.Embedding.forward:
        return
    if embedding.weight.requires_grad and not tied_modules(model):
        embedding.sparse = True
        embedding.whole_gradient = torch.zeros_like(embedding.weight)
        embedding.whole_gradient.filled_rows = torch.empty(0, dtype=torch.int64)


def fill_gradient(model: nn.Module) -> None:
    """Make the gradient whole that `make_sparse` let be sparse, after a backward pass: the same
    numbers as ever; over several micro-batches, or ranks, to rounding. Its `filled_rows` are those
    that are not 0; None where they are not known.
    """
    embedding: Any
    for embedding in model.modules():
        if "whole_gradient" not in vars(embedding) or embedding.weight.grad is None:
            continue
        whole, gradient = embedding.whole_gradient, embedding.weight.grad
        if not gradient.is_sparse:  # rows of one more micro-batch have come to it
            whole.filled_rows = None
            continue
        rows = whole.filled_rows
        whole.zero_() if rows is None else whole.index_fill_(0, rows, 0)
        whole.filled_rows = gradient._indices()[0].clone()  # it may be the batch itself
        embedding.weight.grad = whole.add_(gradient)

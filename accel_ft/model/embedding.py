"""The gradient of the word embedding on a CPU: only the rows that a batch has read.

torch makes a dense gradient for each batch: of MiniLM's 30,522 rows a batch reads about 700, but
47 MB are allocated, zeroed and, under DDP, sent. Here DDP sends only the rows read; the optimizer
then gets a dense gradient, in a buffer that is reused.
"""

import contextlib
from typing import Any

import torch
from torch import nn


def word_embedding(model: Any) -> Any:
    """Return a model's `get_input_embeddings()`; None if the model does not implement it."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()
    return None


def tied_modules(model: nn.Module) -> list[str]:
    """Return the names of all modules that hold the word embedding's weight, if it is tied, as
    BART's and T5's is; else none.
    """
    weight = getattr(word_embedding(model), "weight", None)
    named = [(name, getattr(module, "weight", None)) for name, module in model.named_modules()]
    holders = [name for name, held in named if held is not None and held is weight]
    return holders if len(holders) > 1 else []


def why_unshardable(model: Any) -> str | None:
    """Return why accelerate's FSDP2 cannot shard a plain model; None if it can."""
    if tied := tied_modules(model):
        return f"its word embedding is shared by modules: {', '.join(tied)}"
    if not isinstance(word_embedding(model), nn.Module):
        return "its get_input_embeddings() does not work"
    if model.config.model_type == "squeezebert":
        return "it bypasses its layers' hooks"
    return None


def make_sparse(model: nn.Module) -> None:
    """Make a model's word embedding produce a sparse gradient. Call before DDP wraps the model.

    A no-op if the embedding is frozen, its weight is tied, or it has a forward pass of its own.
    """
    embedding = word_embedding(model)
    if getattr(type(embedding), "forward", None) is not nn.Embedding.forward:
        return
    if embedding.weight.requires_grad and not tied_modules(model):
        embedding.sparse = True
        embedding.whole_gradient = torch.zeros_like(embedding.weight)
        embedding.whole_gradient.filled_rows = torch.empty(0, dtype=torch.int64)


def fill_gradient(model: nn.Module) -> None:
    """Make the sparse gradient of `make_sparse` dense, after a backward pass. Its values are those
    of torch's dense gradient; over several micro-batches or ranks, up to rounding. `filled_rows`
    are the rows that may be nonzero; None if they are not known.
    """
    embedding: Any
    for embedding in model.modules():
        if "whole_gradient" not in vars(embedding) or embedding.weight.grad is None:
            continue
        whole, gradient = embedding.whole_gradient, embedding.weight.grad
        if not gradient.is_sparse:  # backward has added a later micro-batch to it
            whole.filled_rows = None
            continue
        rows = whole.filled_rows
        whole.zero_() if rows is None else whole.index_fill_(0, rows, 0)
        whole.filled_rows = gradient._indices()[0].clone()  # may alias the batch
        embedding.weight.grad = whole.add_(gradient)

"""The doctor's own sample job, for a set-up without a job: a tiny model and made-up rows."""

import random
from itertools import chain
from pathlib import Path

WORDS = {
    "money": ["bank", "shares", "profit", "merger", "tariff"],
    "sport": ["goal", "striker", "league", "medal", "playoff"],
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FILLING = ["the", "a", "of", "in", "to", "on", "with", "from", "after", "says", "new", "two"]


def write_sample(folder: Path) -> None:
    """Write a BERT of 2 layers with random weights to model/, and 256 labelled rows to rows.csv."""
    from transformers import BertConfig, BertModel, BertTokenizer, set_seed

    words = [*SPECIAL, *FILLING, *chain.from_iterable(WORDS.values())]
    numbers = {word: number for number, word in enumerate(words)}
    BertTokenizer(numbers).save_pretrained(folder / "model")
    set_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=128, **sizes)
    BertModel(config).save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = ["text,label"]
    for label in list(WORDS) * 128:
        text = [*rng.choices(FILLING, k=rng.randint(2, 20)), *rng.choices(WORDS[label], k=4)]
        rows.append(f"{' '.join(text)},{label}")
    (folder / "rows.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")

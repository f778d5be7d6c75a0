"""A job of the doctor's own, for a set-up without one: a tiny model and made-up rows."""

import csv
import random
from pathlib import Path

WORDS = {
    "money": ["bank", "shares", "profit", "merger", "tariff"],
    "sport": ["goal", "striker", "league", "medal", "playoff"],
}
FILLING = ["the", "a", "of", "in", "to", "on", "with", "from", "after", "says", "new", "two"]


def write_sample(folder: Path) -> None:
    """Write a BERT of 2 layers with random weights into model/, and 256 labelled rows.csv."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    words = [*special, *FILLING, *(word for group in WORDS.values() for word in group)]
    numbers = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    model = folder / "model"
    roles = zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True)
    PreTrainedTokenizerFast(tokenizer_object=backend, **dict(roles)).save_pretrained(model)
    set_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(model)
    rng, rows = random.Random(0), folder / "rows.csv"
    with rows.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(256):
            label = list(WORDS)[number % 2]
            text = [*rng.choices(FILLING, k=rng.randint(2, 20)), *rng.choices(WORDS[label], k=4)]
            writer.writerow([" ".join(text), label])

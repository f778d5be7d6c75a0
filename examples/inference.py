"""Label texts from Python with a run's model, or with the newest checkpoint of an unfinished run.

python examples/inference.py runs/quickstart ["TEXT" ...]
"""

import sys
from pathlib import Path

import torch
from transformers import pipeline

from accel_ft.checkpoint.open import open_classifier

run = sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart"
texts = sys.argv[2:] or [
    "Striker's late goal sends the hosts into the final",
    "Central bank holds rates as inflation eases",
]

final = Path(run, "model")
if final.is_dir():
    # A finished run has a plain Hugging Face model: opening it needs nothing of accel_ft.
    classifier = pipeline("text-classification", model=str(final))
else:
    # An unfinished run has checkpoints: this opens the newest sound one, of any strategy.
    opened = open_classifier(run, torch.device("cpu"))
    classifier = pipeline("text-classification", model=opened.model, tokenizer=opened.tokenizer)

# A pipeline does not know the length at which texts were cut in training.
cut = {"truncation": True, "max_length": classifier.model.config.max_seq_length}
predictions = classifier(texts, **cut)
for text, prediction in zip(texts, predictions, strict=True):
    print(f"{prediction['label']:10} {prediction['score']:.3f}  {text}")

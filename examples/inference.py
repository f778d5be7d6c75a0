"""Label texts from Python with what a run left behind.

python examples/inference.py runs/quickstart
"""

import sys
from pathlib import Path

from transformers import pipeline

from accel_ft.checkpoint.state import model_folder

run = sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart"
texts = [
    "Striker's late goal sends the hosts into the final",
    "Central bank holds rates as inflation eases",
]

# A finished run holds a plain Hugging Face model: nothing of accel_ft is needed to open it.
final = Path(run, "model")
# A run that is still training has checkpoints only; `model_folder` finds and verifies the newest.
folder = str(final) if final.is_dir() else model_folder(run)

classifier = pipeline("text-classification", model=folder)
for text, prediction in zip(texts, classifier(texts), strict=True):
    print(f"{prediction['label']:10} {prediction['score']:.3f}  {text}")

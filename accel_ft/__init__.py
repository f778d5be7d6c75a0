"""Fine-tune text classifiers with Hugging Face Accelerate: one curve, nothing lost, no silent
fallback.
"""

__version__ = "0.1.0"

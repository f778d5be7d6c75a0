"""What every process needs first: a truthful Accelerator, messages, the Hub, the receipt."""

"""The network and what moves its weights."""

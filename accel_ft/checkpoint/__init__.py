"""What a run is at an update, and how it reaches the disk whole or not at all."""

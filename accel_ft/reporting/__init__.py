"""A run's folder -> pictures, a report, a comparison of two runs."""

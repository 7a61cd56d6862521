"""The watch: what every step spent its time on, always, and when that calls for a capture."""

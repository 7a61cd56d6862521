"""The watch: a summary of every step, always on,
and detection of steps that are worth a capture.
"""

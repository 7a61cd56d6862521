"""Hostile input: what the analysis reads is changed at random; no command may crash,
hang or be fooled.
"""

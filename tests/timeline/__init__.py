"""Tests of reading and merging traces."""

"""Tests of the predictions."""

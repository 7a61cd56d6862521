"""Intervals of time as numpy columns: what capturing and analysing share."""

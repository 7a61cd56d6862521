"""Rollout engines, one adapter each. Importing this imports no engine."""

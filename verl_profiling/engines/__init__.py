"""Adapters of rollout engines, one per engine. Importing this package imports no engine."""

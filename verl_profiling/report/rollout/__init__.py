"""The section "Rollout" of the report: what trajectories waited for."""

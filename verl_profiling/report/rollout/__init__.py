"""The section "Rollout" of the report: where the time of trajectories went."""

"""Says where the accelerator-seconds of a step went."""

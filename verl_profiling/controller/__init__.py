"""The loop's process: the callback, the workers that it drives, and the step folder that it writes."""

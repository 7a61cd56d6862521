"""Real verl with its asynchronous trainers, on a machine without an accelerator."""

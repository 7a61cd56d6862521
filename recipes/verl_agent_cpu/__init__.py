"""Real verl with a multi-turn agent loop and tools, on a machine without an accelerator."""

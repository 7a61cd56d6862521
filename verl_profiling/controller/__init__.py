"""The process of the training loop: the callback, its calls to workers, and its step folders."""

"""Files of a run, which capturing writes and analysing reads."""

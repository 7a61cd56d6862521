"""One recorded process: its session, its capture, its stages, and the messages that it answers."""

"""Recording in one process: the session, the capture, the stages, and messages of the callback."""

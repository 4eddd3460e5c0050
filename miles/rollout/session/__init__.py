"""Token in, token out: the recorder that every harness talks to."""

"""One way to run it: command line, data, DeepSpeed engine, explicit loop, checkpoints and monitoring."""

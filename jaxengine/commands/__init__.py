"""The command line, and its commands chat, complete, generate, demo, convert, calibrate, tune and collect-env."""

"""The command line and its commands: chat, complete, generate, demo, convert, calibrate, tune, collect-env."""

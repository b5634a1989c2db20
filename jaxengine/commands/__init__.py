"""The command line and its commands: chat, generate, demo, convert, calibrate, tune."""

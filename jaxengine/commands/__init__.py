"""The command line, and its commands chat, generate, demo, convert, tune, report and others like them."""

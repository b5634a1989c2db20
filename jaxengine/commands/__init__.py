"""The command line, and the commands of this folder: chat, complete, generate, demo, convert, calibrate, tune and
collect-env.
"""

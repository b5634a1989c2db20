"""What a person types: the command line, chat, demo, convert."""

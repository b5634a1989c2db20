"""What optional capabilities add to the devices' work: a file or a folder for each, under its name."""

"""Optional capabilities' part of the devices' work: one file or folder each, named after the capability."""

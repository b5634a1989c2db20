"""Types of decoded pictures, videos and sounds, the protocol of processors, and the errors of reading media."""

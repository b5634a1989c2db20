"""GGUF files: header, tensor layouts of architectures, blocks dequantised or kept as stored."""

"""adapters: LoRA adapters, in pools on the devices and in the host's memory."""

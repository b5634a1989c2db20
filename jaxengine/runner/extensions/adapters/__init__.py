"""Adapters: LoRA adapters in pools on the devices and in host memory."""

"""LoRA adapters in PEFT folders: configuration, tensors, pools on devices, merging into weights."""

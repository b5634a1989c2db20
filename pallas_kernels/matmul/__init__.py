"""Matrix products: dense, grouped, quantised and of LoRA adapters, with an implementation per platform."""

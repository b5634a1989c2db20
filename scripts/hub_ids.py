"""Repositories of the hub in a form that loads: config.json names an architecture of models.registry and no
quantisation but gpt-oss's MXFP4, and the weights are safetensors in bfloat16, float16 or float32.

Kept by hand from what the repositories publish; left out is what is published in another form only, as DeepSeek-V3,
Kimi K2 and MiniMax-M2 are in FP8.
"""

from __future__ import annotations

# Architecture -> repositories, a few of each.
HUB_IDS: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "MistralForCausalLM": ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
    "Qwen2ForCausalLM": ("Qwen/Qwen2.5-7B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "Qwen3ForCausalLM": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    "MixtralForCausalLM": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "Qwen3MoeForCausalLM": ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-235B-A22B"),
    "Phi3ForCausalLM": ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"),
    "GemmaForCausalLM": ("google/gemma-2b-it", "google/gemma-7b-it"),
    "Gemma2ForCausalLM": ("google/gemma-2-2b-it", "google/gemma-2-9b-it", "google/gemma-2-27b-it"),
    "Qwen2MoeForCausalLM": ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen2-57B-A14B-Instruct"),
    "GraniteForCausalLM": ("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
    "SeedOssForCausalLM": ("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    "InternLM3ForCausalLM": ("internlm/internlm3-8b-instruct",),
    "MiniCPMForCausalLM": ("openbmb/MiniCPM4-8B",),
    "Gemma3ForCausalLM": ("google/gemma-3-270m-it", "google/gemma-3-1b-it"),
    "Gemma3ForConditionalGeneration": ("google/gemma-3-4b-it", "google/gemma-3-12b-it", "google/gemma-3-27b-it"),
    "Olmo2ForCausalLM": ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0325-32B-Instruct"),
    "Olmo3ForCausalLM": ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-32B-Think"),
    "SmolLM3ForCausalLM": ("HuggingFaceTB/SmolLM3-3B",),
    "CohereForCausalLM": ("CohereLabs/c4ai-command-r-v01", "CohereLabs/aya-23-8B"),
    "Cohere2ForCausalLM": ("CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"),
    "Exaone4ForCausalLM": ("LGAI-EXAONE/EXAONE-4.0-1.2B", "LGAI-EXAONE/EXAONE-4.0-32B"),
    "Starcoder2ForCausalLM": ("bigcode/starcoder2-3b", "bigcode/starcoder2-7b", "bigcode/starcoder2-15b"),
    "NemotronForCausalLM": ("nvidia/Nemotron-Mini-4B-Instruct",),
    "ApertusForCausalLM": ("swiss-ai/Apertus-8B-Instruct-2509", "swiss-ai/Apertus-70B-Instruct-2509"),
    "GptOssForCausalLM": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "Glm4MoeForCausalLM": ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
    "Dots1ForCausalLM": ("rednote-hilab/dots.llm1.inst",),
    "OlmoeForCausalLM": ("allenai/OLMoE-1B-7B-0924-Instruct",),
    "Ernie4_5_MoeForCausalLM": ("baidu/ERNIE-4.5-21B-A3B-PT",),
    "HunYuanMoEV1ForCausalLM": ("tencent/Hunyuan-A13B-Instruct",),
    "Llama4ForConditionalGeneration": ("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
    "DeepseekV2ForCausalLM": ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V2-Chat"),
    "DeepseekV3ForCausalLM": ("moonshotai/Moonlight-16B-A3B-Instruct",),
    "Glm4MoeLiteForCausalLM": ("zai-org/GLM-4.7-Flash",),
    "GlmForCausalLM": ("zai-org/glm-4-9b-chat-hf",),
    "Glm4ForCausalLM": ("zai-org/GLM-4-9B-0414", "zai-org/GLM-Z1-32B-0414"),
    "Ernie4_5ForCausalLM": ("baidu/ERNIE-4.5-0.3B-PT",),
    "HunYuanDenseV1ForCausalLM": ("tencent/Hunyuan-0.5B-Instruct", "tencent/Hunyuan-7B-Instruct"),
    "Mistral3ForConditionalGeneration": ("mistralai/Mistral-Small-3.1-24B-Instruct-2503",),
    "Qwen3NextForCausalLM": ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen/Qwen3.5-35B-A3B",),
}

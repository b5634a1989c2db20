"""The stubs are what the protos say, and stay readable for every runtime that pyproject.toml allows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from jaxengine.server.grpc import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "jaxengine" / "server" / "grpc"


def script():
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "scripts" / "generate_stubs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generating_the_stubs_again_changes_nothing():
    made = {ROOT / path: source for path, source in script().generate().items()}
    kept = {path for path in FOLDER.iterdir() if "_pb2" in path.name}
    assert set(made) == kept and len(made) == 6
    changed = [path.name for path, source in made.items() if source != path.read_text()]
    assert not changed, f"run scripts/generate_stubs.py: {changed}"


def test_no_stub_asks_for_the_version_of_the_tools():
    for path in FOLDER.glob("*_pb2*.py"):
        assert not re.search(r"runtime_version|GRPC_GENERATED_VERSION|\d+\.\d+\.\d+", path.read_text()), path.name


# Fields of vLLM 0.33's Inference service by number, from 1 on; "-" for a number that it does not use.
VLLM = {
    "GenerateRequest": "request_id model text token_ids temperature sampling decoding stopping response kv "
    "truncate_prompt_tokens priority session_id media lora_name watermarking kv_hints engine_reasoning_gate",
    "RandomSampling": "num_sequences top_k top_p min_p seed",
    "DecodingParameters": "presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids json "
    "regex choice grammar json_object structural_tag bad_words_token_ids",
    "StoppingCriteria": "max_new_tokens min_new_tokens stop_token_ids stop_strings include_stop_strings ignore_eos "
    "thinking_token_budget",
    "ResponseOptions": "prompt_token_ids prompt_logprobs prompt_candidates output_text output_token_ids "
    "output_logprobs output_candidates skip_special_tokens",
    "KVCacheParameters": "bypass_prefix_cache cache_salt kv_transfer_params ec_transfer_params",
    "CandidateTokens": "top_n token_ids all",
    "SequenceOutput": "index text num_tokens token_ids logprobs ranks candidate_tokens finish_info - sampling_mask",
    "PromptInfo": "num_prompt_tokens token_ids logprobs ranks candidate_tokens",
    "FinishInfo": "num_output_tokens finish_reason stop_token_id eos_token_id stop_string kv_transfer_params - "
    "ec_transfer_params num_cached_tokens",
}


def test_a_client_of_vllms_service_is_not_misread():
    """Each number that vLLM uses has vLLM's name here, or is reserved, so that the field is refused and not taken for
    another one.
    """
    for message, names in VLLM.items():
        kind = pb.DESCRIPTOR.message_types_by_name[message]
        proto = re.search(rf"(?s)^message {message} {{(.*?)^}}", (FOLDER / "inference.proto").read_text(), re.M)
        assert proto is not None
        lines = re.findall(r"^  reserved (.*?);", proto[1], re.M)
        spans = [[int(end) for end in span.split(" to ")] for line in lines for span in line.split(", ")]
        reserved = {number for span in spans for number in range(span[0], span[-1] + 1)}
        for number, name in enumerate(names.split(), 1):
            field = kind.fields_by_number.get(number)
            kept = number in reserved or name == "-" if field is None else field.name == name
            assert kept, (message, number, name)

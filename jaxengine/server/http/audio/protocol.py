"""Fields of /v1/audio/transcriptions and /v1/audio/translations: OpenAI's, and vLLM's sampling parameters."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, ValidationError, create_model, model_validator
from starlette.requests import Request

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.output_limit import limited
from jaxengine.server.http.request.errors import as_request_error, renamed, renaming
from jaxengine.server.http.request.form import FILE, Form
from jaxengine.server.http.request.protocol import HINTS, NUMBERS, NamedRequest

SEGMENT, WORD, GRANULARITIES = "segment", "word", "timestamp_granularities"
_Numbers: Any = create_model("_Numbers", __base__=NamedRequest, **NUMBERS)


class TranscriptionRequest(_Numbers, NamedRequest):
    """Fields of a form. Texts become numbers and truth values as their types say.

    Attributes:
      language: a code, such as "en"; None to detect it.
      prompt: text that the transcript continues, or whose spelling it follows.
      temperature: 0 by default.
      timestamp_granularities: "segment", "word" or both, with response_format verbose_json; none means "segment".
      max_completion_tokens: limit of the tokens of each window of a sound.
      stream_include_usage: token counts at the end of a stream; None includes them too, and true announces them by an
        event without a choice, as in vLLM. stream_continuous_usage_stats: in each event, those so far.
    """

    # The fields of a form are texts, so types must be converted.
    model_config = ConfigDict(strict=False, allow_inf_nan=False, protected_namespaces=())
    refused = {
        "chunking_strategy": ("auto",),
        "hotwords": ("",),
        "include": (),
        "include_stop_str_in_output": ("false",),
        "known_speaker_names": (),
        "known_speaker_references": (),
        "length_penalty": ("1", "1.0"),
        "n": ("1",),
        "to_language": ("en",),
        "use_beam_search": ("false",),
        "vllm_xargs": (),
        "watermarking": ("false",),
    }
    ignored = HINTS

    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[str] = []
    seed: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        """Return this request after checking formats. Raises RequestError for an unknown timestamp granularity, for
        granularities without verbose_json, and for a stream in another format than json and text.
        """
        for each in self.timestamp_granularities:
            if each not in (SEGMENT, WORD):
                problem = f"timestamp_granularities has {show_value(each)}; allowed: {SEGMENT!r} and {WORD!r}"
                raise RequestError(problem, param=GRANULARITIES)
        if self.timestamp_granularities and self.response_format != "verbose_json":
            problem = "timestamp_granularities is only allowed with response_format verbose_json"
            raise RequestError(problem, param=GRANULARITIES)
        if self.stream and self.response_format not in ("json", "text"):
            problem = f"stream is true, and response_format {self.response_format}; allowed: json and text"
            raise RequestError(problem, param="stream")
        return self

    @property
    def has_segments(self) -> bool:
        """Whether the answer's format has times of segments: srt, vtt or verbose_json."""
        return self.response_format in ("srt", "verbose_json", "vtt")

    @property
    def has_words(self) -> bool:
        """Whether the answer has times of words."""
        return WORD in self.timestamp_granularities

    def params(self, inputs: InputProcessor, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of one window: by default the model's, except for temperature 0, and a single
        final output without text; the request's fields replace defaults, and `changes`, fields by name, replace both.
        max_tokens is `limited`.

        Raises RequestError for a value that is not allowed.
        """
        given = {name: getattr(self, name) for name in (*NUMBERS, "seed") if getattr(self, name) is not None}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        usual = {"max_tokens": None, **inputs.generation_defaults, "temperature": 0.0, "return_sampling_mask": False}
        kind = RequestOutputKind.FINAL_ONLY
        values = {**usual, **given, "output_kind": kind, "detokenize": False, **changes}
        name = "max_completion_tokens"
        with renaming(lambda error: renamed(error, name) if error.param == "max_tokens" else error):
            return limited(SamplingParams(**values), inputs)


def read_request(form: Form, request: Request) -> TranscriptionRequest:
    """Return the fields of a form. NAME[...] counts as NAME; timestamp_granularities may occur several times. Names of
    unknown fields, and of fields without effect, are stored in the request's state (unknown_fields, ignored_fields).

    Raises RequestError for a missing file, and for a field that occurs twice or is not valid.
    """
    if form.filename is None:
        raise RequestError("file is missing: the sound to transcribe", param=FILE)
    known = TranscriptionRequest.known_fields()
    values: dict[str, Any] = {}
    for name, given in form.fields.items():
        whole = name.partition("[")[0]  # openai-python writes parts of an object as chunking_strategy[type]
        if whole == GRANULARITIES:
            values[whole] = [*values.get(whole, ()), *given]
        else:
            values.setdefault(whole, form.once(name))
    unknown = [name for name in values if name not in known]
    request.state.unknown_fields = [name for name in unknown if name not in HINTS]
    request.state.ignored_fields = [name for name in unknown if name in HINTS]
    try:
        return TranscriptionRequest(**{name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        raise as_request_error(error) from None

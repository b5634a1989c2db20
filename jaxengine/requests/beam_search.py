"""Beam search by requests for one token with logprobs: vLLM's BeamSearchParams and outputs.

`BeamSearch` selects the beams. Its caller runs a one-token request after each of `prompts`, repeatedly; the prefix
cache holds what the beams share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from jaxengine.requests.output.outputs import PositionLogprobs, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, invalid, plain_scalar
from jaxengine.tokens.tokenizer import Tokenizer

_MAX_PENALTY = 100.0


@dataclass(kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, checked before it begins.

    Attributes:
      beam_width: number of beams to continue after each token, and of sequences in the answer.
      max_tokens: limit of an output.
      ignore_eos: continue after an end-of-sequence token.
      temperature: divisor of the logits. Values other than 0 and 1, which have no effect, need
        logprobs_mode="processed_logprobs".
      length_penalty: a sequence's score is its log-probability divided by this power of its length, which is the number
        of generated tokens, with an end-of-sequence token, as in transformers.
      include_stop_str_in_output: include the text of an end-of-sequence token.
      skip_special_tokens: leave special tokens out of the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        for each in fields(self):
            object.__setattr__(self, each.name, plain_scalar(getattr(self, each.name)))

    def verify(self, max_logprobs: int, logprobs_mode: str) -> None:
        """Raise RequestError for values that are invalid, or not allowed with these engine options.

        max_logprobs: the engine's resolved option, not -1; a beam needs two logprobs. logprobs_mode: the engine's
        option. Modes that report logits allow no beam search, and only processed_logprobs allows a temperature other
        than 0 and 1.
        """
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise invalid(name, value, "a whole number of at least 1")
        if 2 * self.beam_width > max_logprobs:
            raise invalid("beam_width", self.beam_width, f"1 to {max_logprobs // 2}, half of max_logprobs")
        for name, most in (("temperature", 2.0), ("length_penalty", _MAX_PENALTY)):
            value = getattr(self, name)
            least = -most if name == "length_penalty" else 0.0
            if type(value) not in (int, float) or not least <= value <= most:
                raise invalid(name, value, f"a number from {least} to {most}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, getattr(self, name), "True or False")
        if self.temperature not in (0, 1) and logprobs_mode != "processed_logprobs":
            raise invalid("temperature", self.temperature, f"0 or 1 with logprobs_mode={logprobs_mode!r}")
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            problem = f"a beam search adds up log-probabilities, and logprobs_mode is {logprobs_mode!r}"
            raise RequestError(problem, param="use_beam_search")

    def token_params(self) -> SamplingParams:
        """Return the sampling parameters of a request for one token after a beam, with logprobs of the 2 * beam_width
        likeliest tokens and seed 0. End-of-sequence tokens do not end it, and its output is not detokenised. A
        temperature of 0 becomes 1, as processed logprobs would have only the best token.
        """
        return SamplingParams(
            max_tokens=1,
            temperature=float(self.temperature) or 1.0,
            seed=0,
            logprobs=2 * self.beam_width,
            return_sampling_mask=False,
            ignore_eos=True,
            detokenize=False,
        )


@dataclass
class BeamSearchSequence:
    """Beam of a search.

    Attributes:
      tokens: token ids of the prompt and the output.
      logprobs: of the output, see CompletionOutput.logprobs.
      cum_logprob: sum of the output's log-probabilities.
      text: of prompt and output; None without a tokenizer, and before the search has ended.
      finish_reason: "stop" after an end-of-sequence token, else "length"; None while the search continues the beam.
      stop_reason: the end-of-sequence token with finish_reason "stop", else None.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """Result of a beam search. sequences: at most beam_width, best first."""

    sequences: list[BeamSearchSequence]


def candidates(output: RequestOutput) -> PositionLogprobs:
    """Return the logprobs of the tokens that may follow a beam, from the output of its one-token request. Raises
    RequestError if it has none.
    """
    (completion,) = output.outputs
    if not completion.logprobs:
        why = f"{completion.finish_reason} ({completion.stop_reason})"
        raise RequestError(f"the beam search cannot continue: {why}", param="use_beam_search")
    return completion.logprobs[0]


class BeamSearch:
    """Beam search from one prompt. Call `advance` with the candidates of each of `prompts` until `prompts` is empty."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        max_model_len: int,
    ):
        """Begin with one beam, the prompt's token ids. eos_token_ids: tokens that end a beam. max_model_len: limit of
        prompt and output; with no room left, `prompts` is [] at once.
        """
        self._params = params
        self._eos = frozenset(eos_token_ids)
        self._num_prompt = len(prompt_token_ids)
        self._num_left = min(params.max_tokens, max_model_len - self._num_prompt)
        self._beams = [BeamSearchSequence(list(prompt_token_ids))]
        self._completed: list[BeamSearchSequence] = []

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the beams to continue; [] once the search is over."""
        return [beam.tokens for beam in self._beams] if self._num_left > 0 else []

    def advance(self, found: Sequence[PositionLogprobs]) -> None:
        """Extend the beams by one token; the search is complete once no beam runs or max_tokens tokens have been added.
        found: logprobs of the next token of each of `prompts`, in their order.

        Each beam is continued by its 2 * beam_width tokens of lowest rank, then id. One with an end-of-sequence token
        ends, unless ignore_eos. Keeps the beam_width best running beams and as many of the best ended ones, of equal
        ones those found first. Raises ValueError if `found` has another length than the beams.
        """
        grown = []
        for beam, position in zip(self._beams, found, strict=True):
            best = sorted(position.items(), key=lambda entry: (entry[1].rank or 0, entry[0]))
            for token_id, entry in best[: 2 * self._params.beam_width]:
                new = BeamSearchSequence(
                    [*beam.tokens, token_id], [*beam.logprobs, position], beam.cum_logprob + entry.logprob
                )
                if token_id in self._eos and not self._params.ignore_eos:
                    new.finish_reason, new.stop_reason = "stop", token_id
                    self._completed.append(new)
                else:
                    grown.append(new)
        # Equal scores keep the order in which they were found.
        self._beams = sorted(grown, key=self._score, reverse=True)[: self._params.beam_width]
        self._completed = sorted(self._completed, key=self._score, reverse=True)[: self._params.beam_width]
        self._num_left = self._num_left - 1 if self._beams else 0

    def result(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Return the best sequences, at most beam_width, of those that ended and those that reached the limit, best
        first, of equal ones those that ended. Sets the finish_reason of the others to "length".

        tokenizer: writes each sequence's `text`, prompt included; None leaves it None.
        """
        for beam in self._beams:
            beam.finish_reason = "length"
        best = sorted([*self._completed, *self._beams], key=self._score, reverse=True)[: self._params.beam_width]
        if tokenizer is not None:
            for beam in best:
                beam.text = tokenizer.decode(self._shown(beam, 0), skip_special_tokens=self._params.skip_special_tokens)
        return BeamSearchOutput(best)

    def output_token_ids(self, beam: BeamSearchSequence) -> list[int]:
        """Return a beam's tokens after the prompt, without an ending end-of-sequence token unless
        include_stop_str_in_output.
        """
        return self._shown(beam, self._num_prompt)

    def _shown(self, beam: BeamSearchSequence, first: int) -> list[int]:
        """Return a beam's tokens from index `first` on, without an ending end-of-sequence token unless
        include_stop_str_in_output.
        """
        ended = beam.finish_reason == "stop" and not self._params.include_stop_str_in_output
        return beam.tokens[first : len(beam.tokens) - ended]

    def _score(self, beam: BeamSearchSequence) -> float:
        """Return a number that orders beams like cum_logprob / length ** length_penalty: length_penalty * log(length) -
        log(-cum_logprob); infinity for a cum_logprob of 0. The length is the number of generated tokens. The quotient
        itself would leave the range of a float for long outputs.
        """
        if beam.cum_logprob >= 0:
            return math.inf
        return self._params.length_penalty * math.log(len(beam.logprobs)) - math.log(-beam.cum_logprob)

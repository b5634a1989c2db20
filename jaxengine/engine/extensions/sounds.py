"""Sounds: encodes them before the forward passes that need them, and writes the rules of transcripts into slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.engine.extensions.pictures import Pictures
from jaxengine.runner.extensions.sounds.rules import RuleRow, rule_words
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.media import TranscriptRules
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import PROCESSOR
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extensions.sounds import NAME

_DATA = "multi_modal_data"


class Sounds(Pictures):
    """Loop extension for requests to a model that attends to sounds. Its metrics have the names of those of images."""

    name: ClassVar[str] = NAME

    def __init__(self, rules: TranscriptRules | None, cache: Any = None):
        """Set all counts to 0. rules: the checkpoint's rules of transcripts; None for a model without timestamps.
        cache: cache of processed media; None for none.
        """
        super().__init__(cache)
        self._rules = rules

    def prepare(self, request: Request) -> None:
        """Forbid the request the tokens that the rules suppress, by its logit_bias, and have the sampler apply the
        rules, if there are any; changes `request.params`.

        Raises RequestError for a request without exactly one media item.
        """
        if request.media is None or len(request.media.items) != 1:
            problem = f"{_DATA} must have one sound under 'audio': text attends to it (files: /v1/audio/transcriptions)"
            raise RequestError(problem, param=_DATA)
        if self._rules is None:
            return
        suppressed = dict.fromkeys(self._rules.suppressed, float("-inf"))
        own = request.params
        request.params = replace(
            own, capabilities=own.capabilities | PROCESSOR, logit_bias={**own.logit_bias, **suppressed}
        )

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch and count the encoder's calls, and send what requests that are new in their slots attend to, to the
        devices. The step's forward pass must be dispatched next.
        """
        if admitted := self.loop.rows.admitted(step):
            ranks, sounds = self.loop.scheduler.extension(NAME).ranks, []
            for request in admitted:
                assert request.media is not None  # `prepare`
                row = ranks[request.rank].row(request)
                sounds.append((self.loop.rows.number(request), row, request.media.items[0]))
            self.loop.runner.extension(NAME).set_sounds(sounds)
        self._encode(step)

    def sync(self, step: ScheduledStep) -> None:
        """Write the transcript rules of the requests that are new in their slots to the devices, if there are any."""
        admitted, rules = self.loop.rows.admitted(step), self._rules
        if admitted and rules is not None:
            words = [(self.loop.rows.number(request), _words(rules, request)) for request in admitted]
            self.loop.runner.extension(NAME).set_rules(words)


def _words(rules: TranscriptRules, request: Request) -> Any:
    """Return the packed slot columns with a request's transcript rules, given the output tokens that it has already."""
    is_timed = rules.is_timed(request.prompt_token_ids.tolist())
    row = RuleRow(is_timed, rules.first_timestamp, rules.eos, rules.most_initial)
    return rule_words(row, rules.begin, request.output_token_ids.tolist())

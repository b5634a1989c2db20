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

    def __init__(self, rules: TranscriptRules, cache: Any = None):
        """Set all counts to 0. rules: the checkpoint's rules of transcripts. cache: cache of processed media; None for
        none.
        """
        super().__init__(cache)
        self._rules = rules

    def prepare(self, request: Request) -> None:
        """Forbid the request the tokens that the rules suppress, by its logit_bias, and have the sampler apply the
        rules; changes `request.params`.

        Raises RequestError for a request without exactly one media item.
        """
        if request.media is None or len(request.media.items) != 1:
            problem = f"{_DATA} must have one sound under 'audio': every token of this model attends to one"
            raise RequestError(problem, param=_DATA)
        suppressed = dict.fromkeys(self._rules.suppressed, float("-inf"))
        own = request.params
        request.params = replace(
            own, capabilities=own.capabilities | PROCESSOR, logit_bias={**own.logit_bias, **suppressed}
        )

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch and count the encoder's calls, and send the encoder rows of requests that are new in their slots to
        the devices. The step's forward pass must be dispatched next.
        """
        if admitted := self.loop.rows.admitted(step):
            ranks = self.loop.scheduler.extension(NAME).ranks
            rows = [ranks[request.rank].row(request) for request in admitted]
            host = self.loop.runner.extension(NAME)
            host.set_rows([self.loop.rows.number(request) for request in admitted], rows)
        self._encode(step)

    def sync(self, step: ScheduledStep) -> None:
        """Write the transcript rules of the requests that are new in their slots to the devices."""
        admitted = self.loop.rows.admitted(step)
        if admitted:
            words = [(self.loop.rows.number(request), self._words(request)) for request in admitted]
            self.loop.runner.extension(NAME).set_rules(words)

    def _words(self, request: Request) -> Any:
        """Return the packed slot columns with a request's transcript rules, given the output tokens that it has
        already.
        """
        rules = self._rules
        is_timed = rules.is_timed(request.prompt_token_ids.tolist())
        row = RuleRow(is_timed, rules.first_timestamp, rules.eos, rules.most_initial)
        return rule_words(row, rules.begin, request.output_token_ids.tolist())

"""Images that layers attend to: encodes them before the forward passes that need them, and tells the devices which
images a slot's tokens attend to.
"""

from __future__ import annotations

from typing import ClassVar

from jaxengine.engine.extensions.pictures import Pictures
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extensions.crossed_pictures import NAME


class CrossedPictures(Pictures):
    """Loop extension for requests to a model that attends to images. Its metrics have the names of those of images."""

    name: ClassVar[str] = NAME

    def prepare(self, request: Request) -> None:
        """Do nothing: images, unlike sounds, are not cut into windows."""

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch and count the encoder's calls, and send the images of requests that are new in their slots to the
        devices. The step's forward pass must be dispatched next.
        """
        if admitted := self.loop.rows.admitted(step):
            ranks = self.loop.scheduler.extension(NAME).ranks
            slots = [(self.loop.rows.number(each), each.media, ranks[each.rank].rows_of(each)) for each in admitted]
            self.loop.runner.extension(NAME).set_images(slots)
        self._encode(step)

"""Base of processors of the tower RADIO: squares of patches, after the learned tokens of each image or step of a video,
and the text around their embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.text_placeholder import with_one_token
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig

# Values of the column "kind", as jaxengine.models.vision.radio has them.
_IMAGE, _VIDEO, _FIRST_TOKEN = 0, 1, 2
_START, _END = "<img>", "</img>"
_PLACEHOLDER = "<video>"


class RadioProcessor(GridProcessor):
    """Base class of a GridProcessor of RADIO, whose frames are separate in the prompt, each with its number and time.

    A video's placeholder is a text of which tokenizers make several tokens, so `encode` replaces it by one token, which
    is not in the vocabulary and does not occur in the expanded prompt: vocab_size.
    """

    modalities: tuple[str, ...] = ("image", "video")
    frames_first = True
    in_texts: ClassVar[tuple[str, ...]] = ("video",)  # a text with an image may speak of <video>

    def __init__(self, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Set `token_ids`: the token of images, image_token_id of config.json or else img_context_token_id, and
        vocab_size for videos if the model takes any. Raises ModelConfigError for a missing or invalid token.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        fields = ConfigFields(config_json)
        name = "image_token_id" if fields.has("image_token_id") else "img_context_token_id"
        image = fields.integer(name, minimum=0)
        self.token_ids = {"image": image}
        self.check_token_ids(model_config)
        if "video" in self.modalities:
            self.token_ids = {"image": image, "video": model_config.vocab_size}

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an item of the modality in a prompt. That of images needs the tokenizer."""
        return _PLACEHOLDER if modality == "video" else super().placeholder(modality)

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with one token for each placeholder of a video. token_ids: token ids
        of the whole text.
        """
        if "video" not in self.token_ids:
            return list(token_ids)
        return with_one_token(text, token_ids, _PLACEHOLDER, self.token_ids["video"], self.tokenizer)

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, with the rows of learned tokens before those of each step.

        patches: f32 [number of patches, features]. grid: (time, height, width) in patches. seconds: time of each frame
        of a video, NaN if it is unknown; () for an image.
        """
        found, tower = super().processed(patches, grid, seconds), self.tower
        before, cells = tower.rows_before, found.num_rows // grid[0]
        count, unused = before * tower.merge, before * tower.merge - tower.num_tokens
        tokens = np.zeros((len(tower.columns), count), np.int32)
        tokens[0, :unused] = -1
        tokens[tower.columns.index("kind")] = np.arange(count) - unused + _FIRST_TOKEN
        tokens[tower.columns.index("kind"), :unused] = -1
        named = found.columns.reshape(len(tower.columns), grid[0], -1)
        named[tower.columns.index("kind")] = _VIDEO if seconds else _IMAGE
        tokens = np.repeat(tokens[:, None], grid[0], axis=1)
        tokens[0] = np.where(tokens[0] < 0, -1, np.arange(grid[0])[:, None])
        rows = np.pad(found.rows.reshape(grid[0], cells), ((0, 0), (before, 0)), constant_values=-1)
        cut = found.patches.reshape(grid[0], cells * tower.merge, patches.shape[1])
        cut = np.pad(cut, ((0, 0), (count, 0), (0, 0)))
        return found._replace(
            patches=cut.reshape(grid[0] * cut.shape[1], cut.shape[2]),
            columns=np.concatenate([tokens, named], axis=2).reshape(len(tower.columns), -1),
            rows=rows.reshape(-1),
        )

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor._coordinates by name, with "longer", the longer side in patches, and
        "kind", that of images.
        """
        found = super()._coordinates(grid, order)
        longer = np.maximum(found["height"], found["width"])
        return {**found, "longer": longer, "kind": np.full_like(longer, _IMAGE)}

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item, with -1 for each of its embeddings: an image between its start and end, or so
        each step of a video, after the numbers and times of its frames. Raises RequestError without a tokenizer.
        """
        self.check_tokenizer(modality)
        if modality == "image":
            return self.between(_START, item.num_rows, _END)
        steps, depth, tokens = item.grid[0], self.tower.temporal_patch_size, list[np.ndarray]()
        for step in range(steps):
            shown = [_named(n, item.seconds[n], n % depth) for n in range(len(item.seconds)) if n // depth == step]
            before = ("\n" if step else "") + " and ".join(shown) + f": {_START}"
            tokens.append(self.between(before, item.num_rows // steps, _END))
        return np.concatenate(tokens)

    def embedded_id(self, modality: str) -> int:
        return self.token_ids["image"]


def _named(number: int, seconds: float, place: int) -> str:
    """Return the text of a frame: its number, counted from 1 in the prompt, and its time, if that is not NaN. place:
    number of the frame among those that share embeddings.
    """
    name = f"{'frame' if place else 'Frame'} {number + 1}"
    return name if math.isnan(seconds) else f"{name} sampled at {seconds:.2f} seconds"


def times_of(video: Any) -> tuple[float, ...]:
    """Return the time of each frame of a frames.Video in seconds, NaN if its rate is unknown. As in transformers, the
    duration of a frame is rounded down to milliseconds.
    """
    if not getattr(video, "fps", None):
        return (math.nan,) * len(getattr(video, "frames", video))
    duration = int(1000.0 / video.fps)
    return tuple(int(index) * duration / 1000.0 for index in video.frames_indices)


def resized_floats(picture: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return uint8[H, W, 3] resized to [height, width, 3], f32, without rounding and with values beyond those of bytes;
    the array itself if it has that size.
    """
    if picture.shape[:2] == (height, width):
        return picture
    colours = (Image.fromarray(picture[..., colour].astype(np.float32)) for colour in range(3))
    made = [np.asarray(each.resize((width, height), Image.Resampling(resample))) for each in colours]
    return np.stack(made, axis=-1)

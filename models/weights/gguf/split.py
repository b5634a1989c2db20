"""Models in several GGUF files, such as NAME-00001-of-00003.gguf, as llama-gguf-split writes them.

The first file has the metadata, and each file has some of the tensors. The others are found by their names in the
folder of the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from jaxengine.models.params.errors import ModelFileError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def other_parts(path: str, metadata: Mapping[str, Any]) -> list[str]:
    """Return the paths of the files that belong to the first one at `path`, in order; [] for a model in one file.

    Raises ModelFileError for numbers of files that are invalid, for a file that is not the first, is not named as the
    first, or whose other files do not all exist.
    """
    count, number = metadata.get(COUNT, 1), metadata.get(NUMBER, 0)
    if type(count) is not int or type(number) is not int or count < 0 or not 0 <= number < max(count, 1):
        what = f"must say which of how many files this is, got {repr(number)[:50]} of {repr(count)[:50]}"
        raise ModelFileError(path, what, COUNT)
    if count <= 1:
        return []
    folder, file = os.path.split(path)
    name = PART.fullmatch(file)
    if number != 0:
        first = f"{name['stem']}-00001-of-{count:05}.gguf" if name else "the one whose split.no is 0"
        raise ModelFileError(path, f"is file {number + 1} of {count} of a split model; name the first, {first}", NUMBER)
    if name is None or (int(name["number"]), int(name["count"])) != (1, count):
        what = f"is the first of {count} files, so its name must end in -00001-of-{count:05}.gguf, as the others' do"
        raise ModelFileError(path, what, COUNT)
    others = [f"{name['stem']}-{at:05}-of-{count:05}.gguf" for at in range(2, count + 1)]
    if missing := [other for other in others if not os.path.isfile(os.path.join(folder, other))]:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise ModelFileError(path, f"is the first of {count} files, and {shown} must be beside it", COUNT)
    return [os.path.join(folder, other) for other in others]


def check_part(path: str, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Raise ModelFileError unless the metadata of the file at `path` states that it is part `number` (from 0) of
    `count`.
    """
    own = metadata.get(NUMBER), metadata.get(COUNT)
    if any(type(each) is not int for each in own) or own != (number, count):
        what = f"must be file {number + 1} of {count} by its {NUMBER} and {COUNT}, got {repr(own)[:100]}"
        raise ModelFileError(path, what, NUMBER)


def check_tensors(path: str, metadata: Mapping[str, Any], found: int) -> None:
    """Raise ModelFileError if all files together have another number of tensors, `found`, than the metadata of the
    first one, at `path`, states.
    """
    total = metadata.get(TENSORS, found)
    if type(total) is not int or total != found:
        raise ModelFileError(path, f"announces {repr(total)[:50]} tensors, but all files have {found}", TENSORS)

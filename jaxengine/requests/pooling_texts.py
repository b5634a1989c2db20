"""Texts of requests to a pooling model, as they are encoded: with the model's prompt, or as messages."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.config.features.pooling_model import PoolingModel
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer


def has_messages(model: PoolingModel) -> bool:
    """Return whether the model's files say that its texts are messages, which a chat template writes."""
    return model.sentence is not None and model.sentence.messages


def written(
    tokenizer: Tokenizer, model: PoolingModel, prefix: str, texts: Sequence[str], chat_template: str | None
) -> tuple[list[str], bool]:
    """Return (the text to encode for each of `texts`, one or more, whether special tokens are added to these).

    prefix: the model's prompt, "" for none, which is prepended. If texts are messages, each is instead what
    `chat_template` (None: the model's) writes for it as a user's message, after the prefix as a system message. Special
    tokens are then added if the model has a processor and the first result does not begin with the BOS token, as in
    transformers. Slow for messages. Raises RequestError for messages that the template does not take, OverloadedError
    if too many templates are being rendered.
    """
    sentence = model.sentence
    if sentence is None or not has_messages(model):
        return [prefix + text for text in texts], True
    system = [{"role": "system", "content": prefix}] if prefix else []
    found = [
        tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": text}],
            add_generation_prompt=False,
            chat_template=chat_template,
        )
        for text in texts
    ]
    bos = None if tokenizer.bos_token_id is None else tokenizer.backend.id_to_token(tokenizer.bos_token_id)
    has_bos = bool(bos) and found[0].startswith(bos)
    return found, sentence.has_processor and not has_bos


def text_ids(tokenizer: Tokenizer, model: PoolingModel, prefix: str, text: str, chat_template: str | None) -> list[int]:
    """Return the token ids of one text after the model's prompt `prefix`, with special tokens, as `written` describes,
    and padding (`padded`). Raises the errors of both.
    """
    (whole,), special = written(tokenizer, model, prefix, [text], chat_template)
    return padded(tokenizer, model, tokenizer.encode(whole, add_special_tokens=special))


def padded(tokenizer: Tokenizer, model: PoolingModel, token_ids: list[int]) -> list[int]:
    """Return the token ids of a text, followed by padding tokens up to the model's `padded_length`. Raises RequestError
    for a tokenizer without a padding token.
    """
    if len(token_ids) >= model.padded_length:
        return token_ids
    if tokenizer.pad_token_id is None:
        raise RequestError("the model needs texts with padding, and its tokenizer has no pad_token", param="prompt")
    return token_ids + [tokenizer.pad_token_id] * (model.padded_length - len(token_ids))

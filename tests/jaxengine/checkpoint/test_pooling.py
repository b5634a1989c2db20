"""How a model pools, by its files and by the engine's options; no engine is started."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxengine.api.scoring import pair_prompt
from jaxengine.checkpoint.model_source import open_model
from jaxengine.checkpoint.pooling import pooling_of_gguf
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.pooler_config import PoolerConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.pooler import CLS, LAST, MEAN, Classifier
from jaxengine.models.params.errors import ModelFileError
from jaxengine.requests.pooling_texts import text_ids, written
from jaxengine.tokens.tokenizer import Tokenizer
from tests.jaxengine.tokens.test_tokenizer import small_metadata
from tests.tables import each_row

POOLING, MODULES, SENTENCE = "1_Pooling/config.json", "modules.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"


@pytest.fixture
def edited(pooling_folder, tmp_path):
    """edited(name, file, **changes): a copy of a model with another JSON file; a list stands for the whole file."""

    def edit(name, file, content=None, **changes):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(pooling_folder(name), folder)
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes} if content is None else content))
        return str(folder)

    return edit


def pooling_of(folder: str, **options):
    source = open_model(EngineConfig.from_options(model=folder, load_format="dummy", **options))
    assert source.pooling is not None and source.config.pooler == source.pooling.pooler
    return source.pooling


@pytest.mark.parametrize(
    ("config", "pooling_type"),
    [
        ({"pooling_mode": "lasttoken"}, LAST),
        ({"pooling_mode": ["cls"]}, CLS),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, MEAN),
        ({"pooling_mode_cls_token": True}, CLS),
        ({"pooling_mode": "max"}, "MAX"),
        ({"pooling_mode_weightedmean_tokens": True}, "WEIGHTED_MEAN"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "MEAN_SQRT_LEN"),
        ({}, MEAN),
    ],
)
def test_pooling_types(edited, config, pooling_type):
    assert pooling_of(edited("mean", POOLING, config)).pooler.pooling_type == pooling_type
    chosen = {"pooler_config": {"pooling_type": "CLS", "normalize": True}}
    assert pooling_of(edited("mean", POOLING, config), **chosen).pooler.pooling_type == CLS


def test_the_class_takes_what_the_dict_takes():
    """PoolerConfig(...) by all of vLLM's names, as the option's dict."""
    for given in (
        {
            "seq_pooling_type": "CLS",
            "tok_pooling_type": "ALL",
            "normalize": True,
            "enable_flash_late_interaction": True,
        },
        {"task": "embed", "pooling_type": None, "step_tag_id": None, "dimensions": 4},
    ):
        assert PoolerConfig(**given) == PoolerConfig.read(given)
    assert PoolerConfig(seq_pooling_type="CLS") == PoolerConfig(pooling_type="CLS")
    for given, problem in (
        ({"step_tag_id": 5}, "pooler_config.step_tag_id is 5, which is not supported yet"),
        ({"seq_pooling_type": "CLS", "pooling_type": "LAST"}, "pooler_config has pooling_type twice"),
        ({"other": 1}, "pooler_config has no 'other'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            PoolerConfig(**given)


def test_the_longest_input_and_the_default_prompt(edited):
    folder = edited("last", SENTENCE, max_seq_length=40)
    edited("last", PROMPTS, default_prompt_name="query")
    source = open_model(EngineConfig(model=folder, load_format="dummy"))
    assert source.config.max_position_embeddings == 40 and source.pooling.sentence.default_prompt == "query"
    # Without one of its own it is the tokenizer's, as sentence-transformers 6 writes it, where that has one.
    edited("last", SENTENCE, {"transformer_task": "feature-extraction"})
    for limit, longest in ((30, 30), (10**30, 128)):  # transformers writes the second for none
        edited("last", "tokenizer_config.json", model_max_length=limit)
        assert open_model(EngineConfig(model=folder, load_format="dummy")).config.max_position_embeddings == longest


# As sentence-transformers writes them since version 5.4.
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
CROSS_ENCODER = {"model_type": "CrossEncoder"}


def test_the_files_of_a_cross_encoder(edited):
    modules, about = [TRANSFORMER], CROSS_ENCODER
    named = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {}, "default_prompt_name": None}
    edited("one_label", MODULES, modules)
    pooling = pooling_of(edited("one_label", PROMPTS, about | named))
    assert (pooling.task, pooling.activation, pooling.pooler.classifier) == ("classify", "identity", Classifier(1))
    assert pooling_of(edited("one_label", PROMPTS, about)).activation == "sigmoid"
    for file, content, problem in (
        (PROMPTS, about | {"activation_fn": "os.system"}, "activation_fn must be torch.nn.modules"),
        (PROMPTS, about | {"default_prompt_name": "query"}, "default_prompt_name must be null for a CrossEncoder"),
        (PROMPTS, {"model_type": "SentenceTransformer"}, "has no module Pooling"),
    ):
        with pytest.raises(ModelFileError, match=problem):
            pooling_of(edited("one_label", file, content))
    edited("one_label", PROMPTS, about)
    with pytest.raises(ModelFileError, match="must be Transformer, or Transformer and LogitScore, got Transformer, Po"):
        pooling_of(edited("one_label", MODULES, [*modules, {"path": "1", "type": "a.Pooling"}]))


def test_the_files_of_a_decoder_that_answers_yes_or_no(edited):
    score = "1_LogitScore/config.json"
    folder = edited("reranker", MODULES, [TRANSFORMER, {"path": "1_LogitScore", "type": "a.LogitScore"}])
    edited("reranker", PROMPTS, CROSS_ENCODER)
    (Path(folder) / "1_LogitScore").mkdir()
    for tokens, classifier in (
        ({"true_token_id": 7, "false_token_id": 5}, Classifier(1, (5, 7), difference=True)),
        ({"true_token_id": 7, "false_token_id": None}, Classifier(1, (7,))),
    ):
        pooling = pooling_of(edited("reranker", score, tokens | {"module_input_name": "causal_logits"}))
        assert (pooling.task, pooling.activation, pooling.pooler.classifier) == ("classify", "sigmoid", classifier)
    asked = {"classifier_from_token": [9, 8], "method": "no_post_processing"}
    assert pooling_of(folder, hf_overrides=asked).pooler.classifier == Classifier(2, (9, 8))
    for changes, problem in (
        ({"true_token_id": -1}, "true_token_id must be an integer >= 0"),
        ({"true_token_id": 1 << 30}, "token ids must lie in"),
        ({"true_token_id": 7, "module_input_name": "logits"}, "module_input_name must be"),
    ):
        with pytest.raises(ModelFileError, match=problem):
            pooling_of(edited("reranker", score, changes))


def test_a_pair_is_written_in_the_text_that_a_gguf_file_has_for_it():
    """In one pass: a text that has a place in it does not get the other one."""
    stored = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.rerank": "q: {query}\nd: {document}!"}
    tokenizer = Tokenizer.from_gguf({**small_metadata(), **stored})
    model = pooling_of_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": 4}, EngineConfig(), ["cls.output"])
    inputs = SimpleNamespace(
        config=SimpleNamespace(chat_template=None), require_pooling=lambda: model, require_tokenizer=lambda: tokenizer
    )
    expected = tokenizer.encode("q: {document}\nd: b {query}!", add_special_tokens=False)
    assert pair_prompt(inputs, "{document}", "b {query}") == expected
    assert pair_prompt(inputs, "a", "b", "{{ messages[0].content }}") == "a"
    tokenizer.chat_template = {"default": "", "rerank": "{{query}}"}  # another program's
    assert pair_prompt(inputs, "a", "b") == "ab"


def test_texts_that_are_messages(edited):
    """The checkpoint's chat template makes prompts of pairs, if a file says that texts are messages."""
    asked = {"hf_overrides": {"classifier_from_token": [7], "method": "no_post_processing"}}
    edited("reranker", MODULES, [TRANSFORMER])
    folder = edited("reranker", PROMPTS, CROSS_ENCODER)
    with pytest.raises(ModelFileError, match="a CrossEncoder of Qwen3ForCausalLM must have a module LogitScore"):
        pooling_of(folder)
    edited(
        "reranker", "tokenizer_config.json", chat_template="{% for each in messages %}{{ each.content }} {% endfor %}"
    )
    tokenizer = Tokenizer.from_hf_folder(Path(folder))
    for said, prompt in (({}, "w5w6 w7"), ({"message": {"format": "flat"}}, [5, 6, 7])):
        file = edited("reranker", SENTENCE, {"modality_config": {"text": {}, **said}})
        model = pooling_of(file, **asked)
        config = SimpleNamespace(chat_template=None)
        inputs = SimpleNamespace(
            config=config, require_pooling=lambda model=model: model, require_tokenizer=lambda: tokenizer
        )
        assert pair_prompt(inputs, "w5", "w6 w7") == prompt
    message = {"modality_config": {"message": {"format": "flat"}}}
    with pytest.raises(ModelFileError, match='format must be "flat"'):
        pooling_of(edited("last", SENTENCE, {"modality_config": {"message": {"format": "other"}}}))
    for more, problem in (
        ({"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}, "chat_template must be {}"),
        ({"modality_config": {"message": {"format": "structured"}}}, 'format must be "flat"'),
        ({"modality_config": 5}, "modality_config"),
    ):
        with pytest.raises(ModelFileError, match=problem):
            pooling_of(edited("reranker", SENTENCE, message | more), **asked)


def test_texts_of_an_embedder_that_are_messages(edited):
    """As EmbeddingGemma 2 has it: its template takes lists of parts, and a processor may add special tokens."""
    parts = "{% for each in messages %}{% for part in each.content %}{{ part.text }} {% endfor %}{% endfor %}"
    texts = "{% for each in messages %}{{ each.content }} {% endfor %}"
    for template, said, processor, prefix, found in (
        (parts, {"message": {"format": "structured"}}, {}, "", ("w5 w6 ", False)),
        (parts, {"message": {"format": "structured"}}, {"processor_class": "P"}, "w7", ("w7 w5 w6 ", True)),
        (texts, {"message": {"format": "flat"}}, {"processor_class": "P"}, "w7", ("w7 w5 w6 ", True)),
        ("{{ bos_token }}" + texts, {"message": {}}, {"processor_class": "P"}, "", ("</s>w5 w6 ", False)),
        (texts, {"text": {}}, {"processor_class": "P"}, "w7 ", ("w7 w5 w6", True)),
    ):
        folder = edited("last", SENTENCE, {"modality_config": said})
        tokens = {"bos_token": "</s>", "eos_token": "</s>", **processor}
        edited("last", "tokenizer_config.json", {"chat_template": template, **tokens})
        model, tokenizer = pooling_of(folder), Tokenizer.from_hf_folder(Path(folder))
        assert written(tokenizer, model, prefix, ["w5 w6"], None) == ([found[0]], found[1])
        ids = tokenizer.encode(found[0], add_special_tokens=found[1])
        assert text_ids(tokenizer, model, prefix, "w5 w6", None) == ids


@each_row(
    "file",
    [f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "albert", "xlm-roberta", "xlnet")],
)
def test_the_file_about_the_input_is_named_after_the_kind_of_model(encoder_folder, tmp_path, file):
    folder = tmp_path / file
    shutil.copytree(encoder_folder("bert"), folder)
    (folder / file).write_text(json.dumps({"max_seq_length": 40, "do_lower_case": True}))
    source = open_model(EngineConfig(model=str(folder), load_format="dummy"))
    assert source.config.max_position_embeddings == 40
    tokenizer = source.load_tokenizer(EngineConfig())
    assert tokenizer.encode("W5 w9") == [1, 5, 9, 2] and tokenizer.encode_batch(["W5", "w9"]) == [[1, 5, 2], [1, 9, 2]]
    assert tokenizer.encode_pair("W5", "W9", 96) == [1, 5, 2, 96 + 9, 96 + 2]
    # Another tokenizer gets the same texts.
    named = EngineConfig(model=str(folder), tokenizer=encoder_folder("bert"), load_format="dummy")
    assert open_model(named).load_tokenizer(named).encode("W5") == [1, 5, 2]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        (
            MODULES,
            [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2_Dense"}],
            "'Dense' is not",
        ),
        (MODULES, [{"type": "a.Transformer", "path": ""}], "has no module Pooling"),
        (MODULES, [{"type": "a.Pooling", "path": "../elsewhere"}], "must be relative and stay inside"),
        (MODULES, [{"type": "a.Pooling", "path": "missing"}], "there is no such file"),
        (MODULES, [{"type": 5}], "each module must have a type and a path"),
        (MODULES, {"a": 1}, "must hold a list of modules"),
        (MODULES, [], "must hold a list of modules"),
        (POOLING, {"pooling_mode": "first"}, "pooling_mode must be one of lasttoken, mean, cls, max"),
        (POOLING, {"pooling_mode": ["mean", "cls"]}, "pooling_mode must be one of"),
        (POOLING, {"pooling_mode": [["mean"]]}, "pooling_mode must be one of"),
        (
            POOLING,
            {"pooling_mode": None, "pooling_mode_mean_tokens": 1},
            "pooling_mode_mean_tokens must be true or false",
        ),
        (POOLING, {"pooling_mode": "mean", "include_prompt": 0}, "include_prompt must be true or false, got 0"),
        (POOLING, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
        (SENTENCE, {"do_lower_case": "yes"}, "do_lower_case must be true, false or null, got yes"),
        (SENTENCE, {"max_seq_length": -5}, "max_seq_length must be an integer >= 1 or null, got -5"),
        (PROMPTS, {"prompts": {"a": 5}}, "prompts must be at most"),
        (PROMPTS, {"prompts": 0}, "prompts must be at most"),
        (PROMPTS, {"prompts": {}, "default_prompt_name": "a"}, "default_prompt_name must be one of"),
        (PROMPTS, {"prompts": {"a": "b"}, "default_prompt_name": ["a"]}, r"must be one of a, got \['a'\]"),
        ("config.json", {"is_causal": "no"}, "is_causal must be true or false"),
    ],
)
def test_files_that_say_what_is_not_built(edited, file, content, problem):
    if file == POOLING or file == "config.json":
        folder = edited("last", file, **content)
    else:
        folder = edited("last", file, content)
    with pytest.raises(ModelFileError, match=problem):
        open_model(EngineConfig(model=folder, load_format="dummy"))


@pytest.mark.parametrize(
    ("changes", "num_labels", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, 2, "softmax"),
        ({"id2label": None}, 2, "softmax"),
        ({"num_labels": 4, "id2label": None}, 4, "softmax"),
        ({"problem_type": "regression"}, 1, "identity"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, 2, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_labels_and_activations(edited, changes, num_labels, activation):
    pooling = pooling_of(edited("one_label", "config.json", **changes))
    assert (pooling.task, pooling.pooler.classifier, pooling.activation) == (
        "classify",
        Classifier(num_labels),
        activation,
    )
    named = changes.get("id2label", {"0": "LABEL_0"}) or {}
    assert pooling.labels == {int(key): name for key, name in named.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"problem_type": "other"},
        {"id2label": {"a": "b"}},
        {"id2label": {"1" * 5000: "b"}},
        {"num_labels": 0, "id2label": None},
        {"num_labels": 1 << 30, "id2label": None},
        {"sbert_ce_default_activation_function": "os.system"},
        {"matryoshka_dimensions": [0], "architectures": ["LlamaModel"]},
    ],
)
def test_labels_that_cannot_be(edited, changes):
    with pytest.raises(ModelFileError):
        open_model(EngineConfig(model=edited("one_label", "config.json", **changes), load_format="dummy"))


def test_a_generative_checkpoint_pools_when_asked(pooling_folder):
    folder = pooling_folder("reranker")
    assert open_model(EngineConfig(model=folder, load_format="dummy")).pooling is None
    for options in ({"runner": "pooling"}, {"convert": "embed"}, {"task": "embed"}, {"task": "score"}):
        assert pooling_of(folder, **options).task == "embed"
    overrides = {"classifier_from_token": ["w5", "w6", "w7"], "method": "no_post_processing"}
    several = pooling_of(folder, runner="pooling", hf_overrides=overrides)
    assert several.pooler.classifier == Classifier(3, token_ids=(5, 6, 7)) and several.activation == "softmax"


def test_a_model_that_answers_by_tokens_warns_of_a_missing_template(pooling_folder, caplog):
    """Pairs have words of their own in its training, which config.json does not tell."""
    caplog.set_level("WARNING", logger="jaxengine")
    two = {"classifier_from_token": ["w5", "w6"], "is_original_qwen3_reranker": True}
    one = {"classifier_from_token": ["w5"], "method": "no_post_processing"}
    three = {"classifier_from_token": ["w5", "w6", "w7"], "method": "no_post_processing"}
    for overrides, options, warns in (
        (two, {}, True),
        (one, {}, True),
        (two, {"chat_template": "{{ messages }}"}, False),
        (three, {}, False),
    ):
        caplog.clear()
        assert pooling_of(pooling_folder("reranker"), runner="pooling", hf_overrides=overrides, **options)
        assert ("needs a chat_template" in caplog.text) == warns


def test_dimensions_that_no_embedding_has_are_refused_at_start(encoder_folder):
    def opened(name, size, **overrides):
        options = {"hf_overrides": {"is_matryoshka": True, **overrides}, "pooler_config": {"dimensions": size}}
        return pooling_of(encoder_folder(name), **options).dimensions

    # Behind Dense modules an embedding is narrower than hidden states.
    for name, width in (("bert", 32), ("embedding_gemma", 12)):
        assert opened(name, width) == width
        with pytest.raises(ConfigError, match=f"pooler_config.dimensions is {width + 1}; allowed: 1 to {width}"):
            opened(name, width + 1)
        assert opened(name, 4, matryoshka_dimensions=[4, 8]) == 4  # next to is_matryoshka, which it makes superfluous
        with pytest.raises(ModelFileError, match=f"matryoshka_dimensions must be at most {width}"):
            opened(name, 4, matryoshka_dimensions=[4, width + 1])


@each_row(
    ("name", "step"), [("bert_score", 96), ("distilbert_labels", 0), ("xlm_roberta_score", 0), ("modernbert_score", 0)]
)
def test_types_count_where_the_model_has_some(encoder_folder, name, step):
    """Tokenizers number both texts of a pair for models, too, that have no types of tokens."""
    model = pooling_of(encoder_folder(name), hf_overrides={"id2label": {"0": "score"}})
    tokenizer = Tokenizer.from_hf_folder(encoder_folder("bert_score"))
    inputs = SimpleNamespace(
        config=SimpleNamespace(chat_template=None),
        require_pooling=lambda: model,
        require_tokenizer=lambda: tokenizer,
    )
    assert pair_prompt(inputs, "w5", "w6 w7") == [1, 5, 2, *(step + token for token in (6, 7, 2))]


def test_types_do_not_count_where_the_tokenizer_says_so(encoder_folder, tmp_path):
    """By the inputs of models that its configuration names, or that its class has."""
    shutil.copytree(encoder_folder("bert_score"), folder := tmp_path / "model")
    file = folder / "tokenizer_config.json"
    about = json.loads(file.read_text())
    kind, names = {"tokenizer_class": "TokenizersBackend"}, ["input_ids", "token_type_ids", "attention_mask"]
    for changes, told in (
        ({"model_input_names": names}, True),
        ({"model_input_names": names[:1]}, False),
        (kind, False),
        ({**kind, "model_input_names": names}, True),
    ):
        file.write_text(json.dumps(about | changes))
        assert pooling_of(str(folder)).has_token_types == told


@each_row("name", ["bert", "bert_score", "xlm_roberta", "distilbert_labels", "modernbert"])
def test_tokens_that_stand_for_labels_are_refused_for_encoders(encoder_folder, name):
    with pytest.raises(ModelFileError, match="classifier_from_token must be absent for .*, an encoder"):
        pooling_of(encoder_folder(name), hf_overrides={"classifier_from_token": ["w5", "w6"]})


def test_gguf_files_say_a_pooling_type():
    def read(kind, architecture="qwen3", stored=(), own=None, **options):
        metadata = {"general.architecture": architecture, **(own or {})}
        metadata |= {} if kind is None else {f"{architecture}.pooling_type": kind}
        return pooling_of_gguf(metadata, EngineConfig(**options), stored)

    assert read(None) is None and read(0) is None
    assert [read(kind).pooler.pooling_type for kind in (1, 2, 3)] == [MEAN, CLS, LAST]
    assert read(None, runner="pooling").pooler.pooling_type == LAST
    assert read(3, runner="generate") is None
    for encoder, usual in (("bert", CLS), ("nomic-bert", MEAN), ("gemma-embedding", MEAN)):
        assert [read(kind, encoder).pooler.pooling_type for kind in (None, 0, 3)] == [usual, usual, LAST]
    with pytest.raises(ConfigError, match="a GGUF file has no output head"):
        read(1, "bert", runner="generate")
    assert read(np.uint32(4), stored=["cls.output"]).task == "classify"
    for options in ({"runner": "generate"}, {"convert": "embed"}):
        with pytest.raises(ConfigError, match="a GGUF file"):
            read(4, stored=["cls.output"], **options)
    # Its head is BERT's pooler, which files lack; DistilBERT's has another activation.
    for architecture, stored, said in (
        ("bert", ["cls.output", "token_types"], "a reranker of bert must have cls$"),
        ("bert", ["cls", "cls.output"], "a reranker of bert must have token_types"),
        ("bert", [], "must have cls, cls.output, token_types"),
        ("modern-bert", ["cls.output"], "must have cls, cls.norm"),
        ("jina-bert-v2", ["cls"], "those of bert, modern-bert, qwen3, qwen3vl are read, got jina-bert-v2"),
        ("llama", [], "are read, got llama"),
    ):
        with pytest.raises(ModelConfigError, match=said):
            read(4 if not stored else None, architecture, stored)
    head, said = ["cls", "cls.norm", "cls.output"], re.escape("must be 1 (mean) or 2 (first token), got 3")
    with pytest.raises(ModelConfigError, match=f"modern-bert.classifier.pooling_type {said}"):
        read(None, "modern-bert", head, {"modern-bert.classifier.pooling_type": 3})
    pooler = read(None, "modern-bert", head).pooler  # without names of labels
    assert (pooler.pooling_type, pooler.classifier.num_labels) == (MEAN, 1)
    chosen = read(None, "modern-bert", head, pooler_config=PoolerConfig(pooling_type=LAST))
    assert chosen.pooler.pooling_type == LAST
    for labels in ("yes", [1]):
        with pytest.raises(ModelConfigError, match="classifier.output_labels must be a list of names"):
            read(None, "modern-bert", head, {"modern-bert.classifier.output_labels": labels})
    for kind in ("mean", [1], True, -1):
        with pytest.raises(
            ModelConfigError,
            match=re.escape(f"qwen3.pooling_type must be an integer >= 0 and <= 2147483647, got {kind!r}"),
        ):
            read(kind)


def test_a_pooling_model_is_not_converted(pooling_folder, tmp_path):
    from jaxengine.commands.convert import convert

    with pytest.raises(ConfigError, match="is a pooling model, and only models that generate are converted"):
        convert(EngineConfig(model=pooling_folder("last"), disable_log_stats=True), Path(tmp_path) / "new")

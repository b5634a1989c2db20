"""The option chat_template is a template or a file's name, and never a name that is rendered as a template."""

from __future__ import annotations

import dataclasses

import pytest

from jaxengine import ConfigError
from jaxengine.config.engine_config import EngineConfig

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def test_a_file_is_read_and_a_template_is_kept(tmp_path, monkeypatch):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "marked.jinja").write_text(TEMPLATE, "utf-8-sig")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (TEMPLATE, str(tmp_path / "t.jinja"), tmp_path / "t.jinja", "t.jinja", "~/t.jinja", "marked.jinja"):
        config = EngineConfig(chat_template=value)
        assert config.chat_template == TEMPLATE
        assert dataclasses.replace(config, max_num_seqs=1).chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "chat_template '.*none' cannot be read .No such file or directory.; give a template with"),
        (".", "cannot be read .it is not a regular file"),
        ("words", "the file of chat_template '.*words' holds no template"),
        ("bytes", "cannot be read .*utf-8"),
        ("long", "cannot be read .it has more than 1048576 bytes"),
        ("a\0b", "cannot be read .*null"),
    ],
)
def test_what_is_neither(tmp_path, name, said):
    (tmp_path / "words").write_text("as it is")
    (tmp_path / "long").write_text("{{ }}" * (1 << 18))
    (tmp_path / "bytes").write_bytes(b"\xff{{ }}")
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig(chat_template=str(tmp_path / name))
    assert error.value.param == "chat_template"

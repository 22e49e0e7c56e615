"""What a gateway reads of a model: its tokenizer and its chat template."""

import json
from pathlib import Path

import pytest

from gateway.chat_template import ChatTemplate, load_chat_template
from gateway.errors import InvalidRequestError, StartupError
from gateway.tokenizer import ModelTokenizer
from tests.gateway.fakes import TEMPLATE, make_byte_level_tokenizer, make_model_folder

USER = [{"role": "user", "content": "<b> & é"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, True, variables)


def test_missing_and_broken_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such folder"):
        ModelTokenizer.load(tmp_path / "nothing")
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json: ") as caught:
        ModelTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


async def test_truncation_of_the_training_is_off(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    token_ids = await ModelTokenizer.load(folder).encode("the quick brown fox", True, "prompt")
    assert make_byte_level_tokenizer().decode(token_ids) == "the quick brown fox"


async def test_long_text_is_tokenized_as_a_short_one(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(make_model_folder(tmp_path))
    text = "the fox \N{ROCKET}<|end|>" * 1000
    assert await tokenizer.encode(text, False, "prompt") == make_byte_level_tokenizer().encode(text).ids


def test_template_is_found_where_folders_keep_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    config = folder / "tokenizer_config.json"
    assert load_chat_template(folder, "") is not None
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "listed"}]}))
    listed = load_chat_template(folder, "")
    assert listed is not None
    assert listed.render(USER, True, {}) == "listed"
    (folder / "chat_template.jinja").write_text("of a file")
    own = load_chat_template(folder, "")
    assert own is not None
    assert own.render(USER, True, {}) == "of a file"
    (tmp_path / "other.jinja").write_text("override {{ eos_token }}")
    config.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    override = load_chat_template(folder, str(tmp_path / "other.jinja"))
    assert override is not None
    assert override.render(USER, True, {}) == "override </s>"


def test_folder_without_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, "") is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_chat_template(tmp_path, "") is None


def test_broken_template_or_config_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nothing\.jinja: No such file"):
        load_chat_template(tmp_path, "nothing.jinja")
    (tmp_path / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(StartupError, match=r"chat_template\.jinja: line 2"):
        load_chat_template(tmp_path, "")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path, "")


def test_template_has_what_those_on_the_hub_rely_on() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s><b> & é"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<b> & é"}]'
    assert (
        render("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}")
        == "user"
    )
    assert render("{% if not tools %}{{ level }}{% endif %}", level="high") == "high"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if true %}\n  a\n  {% endif %}\n") == "  a\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_failing_or_hostile_template_is_the_request_s_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_default_template_of_the_tests_is_valid() -> None:
    assert render(TEMPLATE).startswith("<|start|>user")

from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_prompts import Prompt, PromptMissingError, PromptVariableError, load

GREETING = Prompt(name="greeting", text="Dear {{name}},\n{{body}}\nYours, {{name}}")


def test_render_fills_every_occurrence():
    assert GREETING.render(name="Ada", body="hello") == "Dear Ada,\nhello\nYours, Ada"


@pytest.mark.parametrize(
    ("given_variables", "complaint"),
    [
        ({"name": "Ada"}, r"missing variables \['body'\]"),
        ({"name": "Ada", "body": "", "date": ""}, r"unknown variables \['date'\]"),
    ],
)
def test_render_demands_exactly_the_variables(given_variables, complaint):
    with pytest.raises(PromptVariableError, match=complaint):
        GREETING.render(**given_variables)


@given(st.text() | st.sampled_from(["{{name}}", "{{body}}", r"\1 \g<0>", "{{", "{%"]))
def test_a_value_is_never_expanded(value):
    assert GREETING.render(name="Ada", body=value) == f"Dear Ada,\n{value}\nYours, Ada"


@pytest.mark.parametrize("text", ["{{Name}}", "{{ name }}", "{{name}", "}} {{", "{{}}"])
def test_braces_without_a_name_are_refused(text):
    with pytest.raises(PromptVariableError, match="'broken'"):
        Prompt(name="broken", text=text)


@pytest.mark.parametrize("name", ["nothing_of_this_name", "../secret", "", "__init__", "A"])
def test_load_refuses_names_that_are_no_template(name):
    with pytest.raises(PromptMissingError):
        load(name)


def test_every_template_of_the_package_loads():
    names = [
        entry.name.removesuffix(".md")
        for entry in resources.files("ragflash_prompts").iterdir()
        if entry.name.endswith(".md")
    ]
    for name in names:
        prompt = load(name)
        values = dict.fromkeys(prompt.variables, "value")
        assert prompt.render(**values).strip()

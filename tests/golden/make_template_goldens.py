"""Write `chat_templates.json`: what transformers renders from the same templates and messages.

    python tests/golden/make_template_goldens.py

Templates are the built-in ones and those in `templates/`, which write the turns of models whose
own templates are not ours to copy.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from ragflash.gguf.template_builtin import BUILTIN_TEMPLATES

HERE = Path(__file__).parent
BOS = "<bos>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather of a <place>, as "text"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Zürich, 東京"},
                "days": {"type": "integer", "description": "1 to 7"},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Answer from the documents.\n\nQuote them."}
ASK = {"role": "user", "content": "What is 2 + 2?"}
REPLY = {"role": "assistant", "content": "4.\n\nFour."}
AGAIN = {"role": "user", "content": "Wie heißt das auf 日本語?"}
THOUGHT = {**REPLY, "reasoning_content": "Two and two\nmake four."}
ARGUMENTS = {"city": "Zürich", "days": 3, "opts": {"a": [1, None, True], "b": "<x>"}}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I must look.",
    "tool_calls": [
        {"type": "function", "id": "a1", "function": {"name": "weather", "arguments": ARGUMENTS}},
        {
            "type": "function",
            "id": "a2",
            "function": {"name": "weather", "arguments": {"city": "x"}},
        },
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "a1", "name": "weather", "content": '{"sun": true}'},
    {"role": "tool", "tool_call_id": "a2", "name": "weather", "content": "rain\nand wind"},
]
DOCUMENTS = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [ASK],
    "with rules": [SYSTEM, ASK],
    "several turns": [SYSTEM, ASK, REPLY, AGAIN],
    "thoughts": [ASK, THOUGHT, AGAIN],
    "a call": [SYSTEM, ASK, CALL, *RESULTS],
    "a call and its use": [ASK, THOUGHT, AGAIN, CALL, *RESULTS, THOUGHT],
}
PLAIN = ("one question", "with rules", "several turns")
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen36": [
        {},
        {"enable_thinking": False},
        {"preserve_thinking": True},
        {"tools": [WEATHER], "enable_thinking": True},
        {"documents": DOCUMENTS, "add_generation_prompt": False},
    ],
    "qwen38": [
        {},
        {"enable_thinking": False, "preserve_thinking": False},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "medium", "tools": [WEATHER, WEATHER]},
    ],
    "gemma4": [
        {},
        {"enable_thinking": True},
        {"tools": [WEATHER], "enable_thinking": False},
        {"add_generation_prompt": False},
    ],
}


def list_cases() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for name, source in BUILTIN_TEMPLATES.items():
        for chat in PLAIN:
            yield f"built-in {name}", source, chat, {}
        yield f"built-in {name}", source, "several turns", {"add_generation_prompt": False}
    for name, settings in SETTINGS.items():
        source = (HERE / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        for chat in CHATS:
            for setting in settings:
                yield name, source, chat, setting


def main() -> None:
    goldens = []
    for name, source, chat, setting in list_cases():
        options = {"add_generation_prompt": True, **setting}
        rendered, _ = render_jinja_template(
            [CHATS[chat]], chat_template=source, bos_token=BOS, **options
        )
        case = {"template": name, "chat": chat, "options": options, "rendered": rendered[0]}
        goldens.append(json.dumps(case, ensure_ascii=False))
    body = ",\n".join(goldens)
    chats = json.dumps(CHATS, ensure_ascii=False)
    target = HERE / "chat_templates.json"
    target.write_text(f'{{"chats": {chats},\n"goldens": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

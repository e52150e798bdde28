"""Chat templates for model files that bring none, chosen by the turn tokens of the vocabulary.

They write what the families' own templates write for system, user and assistant turns of plain
text, and take any order of turns.
"""

from collections.abc import Collection

_CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
{{- message.content ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Gemma 3 has no system turns: what the system says opens the next turn of the user.
_GEMMA3 = """
{{- bos_token }}
{%- set pending = namespace(text='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set pending.text = pending.text ~ message.content ~ '\\n\\n' %}
{%- else %}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
{%- if message.role != 'assistant' %}{{- pending.text }}{%- set pending.text = '' %}{%- endif %}
{{- message.content ~ '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if pending.text %}
{{- '<start_of_turn>user\\n' ~ pending.text ~ '<end_of_turn>\\n' }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

_GEMMA4 = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
{{- message.content ~ '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}
"""

_PLAIN = """
{%- for message in messages %}
{{- message.role | capitalize ~ ': ' ~ message.content ~ '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""

BUILTIN_TEMPLATES = {
    "gemma4": _GEMMA4,
    "gemma3": _GEMMA3,
    "llama3": _LLAMA3,
    "chatml": _CHATML,
    "plain": _PLAIN,
}
_TURN_TOKENS = {
    "gemma4": {"<|turn>", "<turn|>"},
    "gemma3": {"<start_of_turn>", "<end_of_turn>"},
    "llama3": {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
    "chatml": {"<|im_start|>", "<|im_end|>"},
}


def builtin_family(tokens: Collection[str]) -> str:
    """The family whose turn tokens are among these control tokens, or `plain`."""
    known = set(tokens)
    return next((family for family, needed in _TURN_TOKENS.items() if needed <= known), "plain")

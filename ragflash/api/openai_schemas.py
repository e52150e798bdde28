"""Bodies of the routes that copy OpenAI's.

Clients of all ages send keys that nobody knows: these are ignored. A key that would change the
answer and cannot be honoured is refused by name.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ragflash.api.schemas import DraftModeField, DraftTokens, EngineTimingsOut, Text, encodable
from ragflash.engine.choices import MAX_CHOICES
from ragflash.engine.constraint import Constraint, Grammar, GrammarDialect
from ragflash.engine.logprobs import MAX_TOP, Candidate, TokenLogprob
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SegmentKind,
    TextSegment,
    Timings,
    Usage,
)
from ragflash.errors import ConstraintUnsupported, InputError

DEFAULT_MAX_TOKENS = 1024

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.CONSTRAINT: "stop",
    FinishReason.LENGTH: "length",
}


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class TextPart(_Lenient):
    """One part of a message; only text is understood."""

    type: Text
    text: Text = ""


class MessageBody(_Lenient):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[Any] | None = None

    def text(self) -> str:
        """Join the text parts.

        Raises:
            InputError: A part is not text.
        """
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type not in {"text", "input_text", "output_text"}:
                raise InputError(f"content of type {part.type!r} is not supported; send text")
        return "".join(part.text for part in self.content)


class StreamOptions(_Lenient):
    """What a stream carries besides text."""

    include_usage: bool = False


class JsonSchemaFormat(_Lenient):
    """A JSON schema that the output keeps to; `strict` changes nothing, since it always does."""

    name: Text | None = None
    wanted: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Lenient):
    """The wanted form of the output, kept to whatever the prompt says.

    A reply whose `finish_reason` is `length` was cut off before it was complete.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> Constraint | None:
        """Give what the engine holds the output to.

        Raises:
            InputError: The schema is missing.
        """
        if self.type == "text":
            return None
        wanted: dict[str, Any] = {"type": "object"}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InputError("response_format of type 'json_schema' needs a json_schema")
            wanted = self.json_schema.wanted
        return Grammar(GrammarDialect.JSON_SCHEMA, json.dumps(wanted))


def _spelled(tools: list[Any] | None) -> list[Any] | None:
    encodable(json.dumps(tools, ensure_ascii=False))
    return tools


class ChatBody(_Lenient):
    """A chat completion request; without `temperature` decoding is greedy.

    With a model `ragflash/doc:{id}` the conversation is about that document, which stands before
    all messages; `tools` are shown to the model behind it, and what it writes comes back as text.

    Log-probabilities are of the distribution after penalties and bias, before temperature and cuts,
    for the tokens whose text is in the reply. With a `seed`, each of `n` choices comes out the same
    again.
    """

    model: Annotated[Text, Field(examples=["ragflash"])]
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    tools: Annotated[list[Any] | None, AfterValidator(_spelled)] = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    draft: DraftModeField = DraftMode.AUTO
    draft_tokens: DraftTokens = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="What the model's chat template is told besides, such as `enable_thinking`, "
        "which is false unless it is set here; thoughts are part of the content.",
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def request(
        self, request_id: str, namespace: str, *, about_document: bool = False
    ) -> GenerateRequest:
        """Give what the engine takes; it clamps the output to what the context leaves.

        Tools are none of it, and refused where no document is asked about.

        Raises:
            InputError: Something cannot be honoured.
        """
        self._refuse(about_document=about_document)
        chosen = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if name != "logit_bias" and (value := getattr(self, name)) is not None
        }
        bias = tuple(sorted((self.logit_bias or {}).items()))
        return GenerateRequest(
            id=request_id,
            messages=_messages(self.messages),
            namespace=namespace,
            max_tokens=self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS,
            stop=_stop(self.stop),
            sampling=SamplingParams(**chosen, logit_bias=bias),
            constraint=self.response_format.constraint() if self.response_format else None,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            variables=tuple((self.chat_template_kwargs or {}).items()),
        )

    def _refuse(self, *, about_document: bool) -> None:
        if self.functions or (self.tools and not about_document):
            raise ConstraintUnsupported(
                "tools are not supported by this model; send none or an empty list"
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise ConstraintUnsupported(
                "this tool_choice is not supported: calls are not read from the output; "
                "send 'auto' or 'none'"
            )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in texts:
        raise InputError("stop holds an empty text, which would end every output at once")
    return texts


def _messages(bodies: list[MessageBody]) -> tuple[ChatMessage, ...]:
    last_user = max(
        (index for index, body in enumerate(bodies) if body.role == "user"), default=None
    )
    if last_user is None:
        raise InputError("messages hold no turn of the user")
    messages: list[ChatMessage] = []
    for index, body in enumerate(bodies):
        if body.role in {"tool", "function"} or body.tool_calls:
            raise ConstraintUnsupported(
                f"messages.{index}: tool calls and their results are not supported"
            )
        role = "system" if body.role == "developer" else body.role
        kind = SegmentKind.CONVERSATION
        if role == "system" and all(message.role == "system" for message in messages):
            kind = SegmentKind.RULES
        elif index == last_user:
            kind = SegmentKind.QUESTION
        messages.append(ChatMessage(role, (TextSegment(kind, body.text()),)))
    return tuple(messages)


def usage_body(usage: Usage) -> dict[str, Any]:
    """Spell token counts as OpenAI does."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprobs_body(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Spell log-probabilities as OpenAI does."""
    content = [
        _candidate(each.chosen) | {"top_logprobs": [_candidate(other) for other in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": candidate.data.decode("utf-8", errors="replace"),
        "logprob": candidate.logprob,
        "bytes": list(candidate.data) or None,  # a control token has none
    }


def cache_body(finished: Finished) -> dict[str, Any]:
    """Say where the prompt's cached tokens were, and why there were not more."""
    return {
        "cache_tier": finished.tier,
        "miss_reason": finished.miss_reason,
        "miss_field": finished.miss_field,
    }


def timings_body(timings: Timings) -> dict[str, Any]:
    """Spell timings as everywhere in this API."""
    return EngineTimingsOut.of(timings).model_dump()

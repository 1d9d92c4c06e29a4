"""Models of OpenAI's request bodies, with the extensions of llama.cpp and vLLM.

The gateway accepts a `ChatRequest` or `CompletionRequest`; a line of a batch holds a `ChatJob` or `CompletionJob`.
`call.py` validates bodies with them, and /openapi.json is generated from them. Unknown keys are errors; null means the
same as absence. The capabilities of an engine are not considered here.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tokenmill.engine.engine import MAX_LOGPROBS
from tokenmill.errors import RequestRefused

MAX_STOPS = 64
MAX_BIASES = 1024
HIGHEST_PRIORITY = 1000
_INT31 = (1 << 31) - 1
_INT64 = 1 << 63

_Text = Annotated[str, Meta(min_length=1)]
_Probability = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_RepeatPenalty = Annotated[float, Meta(ge=0.01, le=100)]
_MaxTokens = Annotated[int, Meta(ge=1, le=_INT31)]
_Window = Annotated[int, Meta(ge=-1, le=_INT31)]
_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Token = Annotated[int, Meta(ge=0, le=_INT31)]
_Tokens = Annotated[list[_Token], Meta(min_length=1)]
# `$` alone also matches before a final newline.
_TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(?!\n)$")]
_Nothing = Annotated[list[Any], Meta(max_length=0)] | Annotated[dict[str, Any], Meta(max_length=0)] | None


# ---- messages


class TextPart(Struct, tag_field="type", tag="text"):
    """A text part of a message."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A part of an assistant message that refuses to answer."""

    refusal: str


class ImageUrl(Struct):
    """An image as a data: URL, or by http(s) URL if the engine's remote_media is set."""

    url: Annotated[str, Meta(pattern="^(data:image/|https?://)")]
    detail: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image, for engines that read images."""

    image_url: ImageUrl


class InputAudio(Struct):
    """Audio, in base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    """Audio, for engines that read audio."""

    input_audio: InputAudio


_Content = str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)]
_MediaContent = str | Annotated[list[TextPart | RefusalPart | ImagePart | AudioPart], Meta(min_length=1)]


class _Message(Struct, tag_field="role", forbid_unknown_fields=True, kw_only=True, gc=False):
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    refusal: Any = None
    reasoning_content: str | None = None
    reasoning: Any = None
    annotations: Any = None
    audio: None = None


class SystemMessage(_Message, tag="system"):
    """Instructions."""

    content: _Content


class DeveloperMessage(_Message, tag="developer"):
    """Instructions, under OpenAI's newer name."""

    content: _Content


class UserMessage(_Message, tag="user"):
    """A message of the user."""

    content: _MediaContent


class AssistantMessage(_Message, tag="assistant"):
    """A message of the model, or its tool calls."""

    content: _Content | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls and not self.function_call:
            raise ValueError("has no content")


class ToolMessage(_Message, tag="tool"):
    """The result of a tool call."""

    content: _MediaContent


class FunctionMessage(_Message, tag="function"):
    """The result of a function call, under OpenAI's older name."""

    content: _Content


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


# ---- tools and response formats; keys that are not listed are allowed


class Function(Struct):
    """A function that the model may call."""

    name: str
    description: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    parameters: Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})] = None


class Tool(Struct, tag_field="type", tag="function"):
    """A tool that the model may call."""

    function: Function


class FunctionName(Struct):
    """The name of a function."""

    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """The tool that the model must call."""

    function: FunctionName


class TextFormat(Struct, tag_field="type", tag="text"):
    """An answer in any format."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """An answer that is a JSON object; llama.cpp also accepts a schema here."""

    schema: dict[str, Any] | None = None


class NamedSchema(Struct):
    """A JSON schema."""

    schema: dict[str, Any]
    name: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """An answer that follows a JSON schema."""

    json_schema: NamedSchema


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Additional content of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


# ---- bodies


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What all bodies have in common."""

    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the first.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None, Meta(description="0: always the most likely token.")
    ] = None
    top_p: Annotated[_Probability | None, Meta(description="Probability mass of the tokens to draw from.")] = None
    top_k: Annotated[_Window | None, Meta(description="Number of tokens to draw from; 0 and -1: all.")] = None
    min_p: Annotated[
        _Probability | None, Meta(description="Minimum probability, relative to the most likely token.")
    ] = None
    presence_penalty: Annotated[_Penalty | None, Meta(description="Penalty for tokens that have occurred.")] = None
    frequency_penalty: Annotated[_Penalty | None, Meta(description="Penalty per occurrence of a token.")] = None
    repeat_penalty: Annotated[_RepeatPenalty | None, Meta(description="llama.cpp's name of repetition_penalty.")] = None
    repetition_penalty: Annotated[_RepeatPenalty | None, Meta(description="vLLM's name of repeat_penalty.")] = None
    repeat_last_n: Annotated[
        _Window | None, Meta(description="Number of last tokens that repeat_penalty considers; -1: the whole context.")
    ] = None
    penalty_last_n: Annotated[_Window | None, Meta(description="The same as repeat_last_n.")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None,
        Meta(description="Seed for sampling; choice i uses seed + i. -1: random."),
    ] = None
    max_tokens: Annotated[
        _MaxTokens | None, Meta(description="Maximum tokens of the answer; default: the rest of the context.")
    ] = None
    stop: _Text | Annotated[list[_Text], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: (
        Annotated[dict[_TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None
    ) = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    json_schema: Annotated[dict[str, Any] | None, Meta(description="llama.cpp's response_format.")] = None
    grammar: Annotated[str | None, Meta(description="llama.cpp: GBNF grammar of the answer.")] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="llama.cpp, vLLM: do not stop at the end-of-sequence token.")
    ] = None
    stream: bool | None = None
    timeout: Annotated[
        Annotated[float, Meta(ge=0.001, le=10_000_000)] | None, Meta(description="Timeout of the request in seconds.")
    ] = None
    user: Annotated[Any, Meta(description="Ignored.", extra_json_schema={"type": ["string", "null"]})] = None
    metadata: Annotated[Any, Meta(description="Ignored.", extra_json_schema={"type": ["object", "null"]})] = None
    cache_prompt: Annotated[Any, Meta(description="Ignored: prefixes are always reused.")] = None


class _Chat(GenerationRequest):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[_MaxTokens | None, Meta(description="The same as max_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[_Logprobs | None, Meta(description="Requires logprobs.")] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="llama.cpp, vLLM: variables of the chat template.")
    ] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="none: no thinking; other values are passed to the chat template.")
    ] = None
    functions: Annotated[_Nothing, Meta(description="Not supported: use tools.")] = None
    function_call: Annotated[_Nothing, Meta(description="Not supported: use tool_choice.")] = None
    audio: Annotated[_Nothing, Meta(description="Not supported: only text.")] = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    verbosity: Annotated[Literal["medium"] | None, Meta(description="Not supported by local models.")] = None
    web_search_options: Annotated[_Nothing, Meta(description="Not supported.")] = None
    prediction: Annotated[Any, Meta(description="Ignored.")] = None
    store: Annotated[Any, Meta(description="Ignored.")] = None
    safety_identifier: Annotated[Any, Meta(description="Ignored.")] = None
    prompt_cache_key: Annotated[Any, Meta(description="Ignored.")] = None
    prompt_cache_retention: Annotated[Any, Meta(description="Ignored.")] = None


class _Completion(GenerationRequest):
    prompt: Annotated[
        str | Annotated[list[_Token | str | _Tokens], Meta(min_length=1)],
        Meta(description="A text, a list of tokens, or a list of prompts."),
    ]
    logprobs: Annotated[_Logprobs | None, Meta(description="Number of alternatives per token.")] = None
    echo: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None
    suffix: Annotated[Literal[""] | None, Meta(description="Not supported.")] = None

    def __post_init__(self) -> None:
        if self.echo:
            raise RequestRefused("echo: not supported", param="echo", hint="remove echo")


_Choices = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="Number of answers; the prompt is computed once. Maximum: gateway.max_choices."),
]
_BestOf = Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="The same as n.")]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
    Meta(description="flex: batch priority, below interactive requests."),
]
_Priority = Annotated[int, Meta(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] | None  # higher runs first
_Deadline = Annotated[float, Meta(ge=0, le=1e11)] | None  # Unix time


class ChatRequest(_Chat):
    """The body of /v1/chat/completions."""

    n: _Choices = None
    best_of: _BestOf = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier = None


class CompletionRequest(_Completion):
    """The body of /v1/completions."""

    n: _Choices = None
    best_of: _BestOf = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier = None


class ChatJob(_Chat):
    """The body of a chat completion in a batch."""

    n: Literal[1] | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: Any = None
    priority: _Priority = None
    deadline: _Deadline = None


class CompletionJob(_Completion):
    """The body of a text completion in a batch."""

    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    stream_options: dict[str, Any] | None = None
    priority: _Priority = None
    deadline: _Deadline = None


LINE_KEYS = frozenset(("custom_id", "method", "url", "body"))
JOB_KEYS = frozenset((*ChatJob.__struct_fields__, *CompletionJob.__struct_fields__))

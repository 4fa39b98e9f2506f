"""How a model's folder writes conversations: its Jinja template, rendered by transformers.

Called by :mod:`duckllm.text.tokenizer`. Knows text, and no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from duckllm.errors import CheckpointError, RequestError
from duckllm.text.loading import first_line
from duckllm.text.template_steps import TooManyStepsError, run_limited

Message = Mapping[str, Any]

# Steps of a template: far more than templates take (some hundreds a message), less than a second or two.
_MAX_STEPS = 1_000_000
_MAX_STEPS_EACH = 20_000  # more for each message and each tool

# What every template is given.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate(Protocol):
    """Writes conversations as a model was trained to read them."""

    @property
    def source(self) -> str:
        """All texts that it may write by itself."""

    @property
    def variables(self) -> frozenset[str]:
        """Names of the options that it knows."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Message | None = None
    ) -> str:
        """The conversation, up to where the assistant's reply begins.

        Raises:
            RequestError: It refuses the conversation.
            CheckpointError: It is broken.
        """


class JinjaTemplate:
    """The template of a transformers tokenizer.

    Args:
        inner: The tokenizer.
        folder: Where it is from, for messages.
    """

    def __init__(self, inner: Any, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        template = inner.chat_template
        self._sources = list(template.values()) if isinstance(template, dict) else [template]

    @property
    def source(self) -> str:
        """The template's text; of several, one behind the other."""
        return "\n".join(self._sources)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that it looks up, but for what every template is given; none where it is broken."""
        import jinja2
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation_tag()])
        names: set[str] = set()
        try:
            for source in self._sources:
                names |= meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError:
            return frozenset()
        return frozenset(names - _GIVEN - set(self._inner.special_tokens_map) - set(environment.globals))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Message | None = None
    ) -> str:
        """The conversation, up to where the assistant's reply begins.

        Raises:
            RequestError: The template refuses the conversation.
            CheckpointError: It is broken, or does not come to an end.
        """
        import jinja2

        max_steps = _MAX_STEPS + _MAX_STEPS_EACH * (len(messages) + len(tools))

        def run() -> str:
            return str(
                self._inner.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **(options or {}),
                )
            )

        where = f"chat_template: {self._folder} has"
        try:
            return run_limited(run, max_steps)
        except TooManyStepsError as error:
            raise CheckpointError(
                f"{where} one that takes more than {max_steps} steps, expected one that comes to an end"
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{where} a broken one at line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error
        except Exception as error:  # a template is a program; whatever it raises is the folder's fault
            raise CheckpointError(f"{where} a broken one: {first_line(error)}") from error


def _generation_tag() -> Any:
    """The tag of transformers that marks replies, as far as it must be known to read a template."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    return GenerationTag

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

# Most steps and seconds of a template, and how many more for each message and each tool. Templates take some
# hundred steps a message, and a tenth of a millisecond.
_MAX_STEPS, _MAX_STEPS_EACH = 1_000_000, 20_000
_MAX_S, _MAX_S_EACH = 5.0, 0.01

# What every template is given, beside special tokens (bos_token).
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


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
        from jinja2 import meta, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation_tag()])
        names: set[str] = set()
        try:
            for source in self._sources:
                tree = environment.parse(source)
                # What is set in one place is its own elsewhere too, unless it asks whether it was given.
                own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
                asked = {
                    test.node.name
                    for test in tree.find_all(nodes.Test)
                    if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
                }
                names |= meta.find_undeclared_variables(tree) - (own - asked)
        except jinja2.TemplateError:
            return frozenset()
        names -= _GIVEN | set(environment.globals)
        return frozenset(name for name in names if not name.endswith("_token"))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Message | None = None
    ) -> str:
        """The conversation, up to where the assistant's reply begins.

        Raises:
            RequestError: The template refuses the conversation.
            CheckpointError: It is broken, or does not come to an end.
        """
        import jinja2

        size = len(messages) + len(tools)
        max_steps, max_s = _MAX_STEPS + _MAX_STEPS_EACH * size, _MAX_S + _MAX_S_EACH * size

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
            return run_limited(run, max_steps, max_s)
        except TooManyStepsError as error:
            raise CheckpointError(
                f"{where} one that takes more than {max_steps} steps or {max_s:g} s, "
                "expected one that comes to an end"
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

"""The reasoning in the answer to one chat: where it begins and ends, and how many tokens it has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from setpoint.core.errors import RequestError
from setpoint.frontend.chat.formats.format import ReasoningFormat
from setpoint.frontend.chat.prompt import Prompt
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Thinking:
    form: ReasoningFormat
    starts_inside: bool
    """Whether the output begins in the reasoning."""
    is_expected: bool
    """Whether the model reasons before this answer."""
    tokenizer: Tokenizer

    def opened(self) -> Thinking:
        """The same behind a prompt that ends with ``opening``."""
        return replace(self, starts_inside=True)

    @property
    def opening(self) -> str:
        """What makes a model reason that might skip it: the beginning of its answer."""
        return f"{self.form.begin}\n"

    def end_ids(self) -> tuple[int, ...]:
        """The token ids after which the answer itself begins. Raises RequestError (400) if they are
        not certain, because the tokenizer writes the end of the reasoning as ordinary text."""
        ids = self.tokenizer.encode(self.form.end, add_special_tokens=False).tolist()
        if len(ids) != 1:
            raise RequestError(
                f"A constraint cannot begin behind the reasoning, because {self.form.end!r} is not"
                " one token of this model. Turn the reasoning off, or drop the constraint."
            )
        return tuple(ids)

    def num_tokens(self, output: SequenceOutput) -> int:
        """How many of the output's tokens are reasoning, its markers included."""
        if not self.starts_inside and not output.text.lstrip().startswith(self.form.begin):
            return 0
        end = self.tokenizer.encode(self.form.end, add_special_tokens=False).tolist()
        if len(end) == 1:
            ids = output.output_ids
            return ids.index(end[0]) + 1 if end[0] in ids else output.num_outputs
        before, marker, _ = output.text.partition(self.form.end)
        if not marker:
            return output.num_outputs
        # Where the marker is ordinary text its tokens may be joined with others: count anew.
        written = self.tokenizer.encode(before + marker, add_special_tokens=False)
        return min(len(written), output.num_outputs)


def thinking_of(form: ReasoningFormat, prompt: Prompt, text: TextProcessor) -> Thinking:
    starts_inside = form.starts_inside(prompt.rendered, started=prompt.started)
    can_switch = bool(form.variable) and text.template_uses(form.variable)
    is_expected = starts_inside or (
        can_switch
        and not prompt.started
        and prompt.variables.get(form.variable) is not False
        and not prompt.rendered.rstrip().endswith(form.end)
    )
    return Thinking(form, starts_inside, is_expected, text.tokenizer)
